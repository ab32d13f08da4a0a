"""Workers from the command line, and on two hosts: here two supervisors on one machine that share only a store."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.forked import forking
from tools.processes import below, parents, wait_until_gone
from wan_core.cli import main
from wan_core.config import LoadOptions, Request
from wan_core.media.video import read_metadata, read_video
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Watch
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import WorkerError, Workers
from wan_core.workers.options import WorkerOptions
from wan_core.workers.processes import WorkerProcesses
from wan_core.workers.rendezvous import Meeting

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.slow]

SMALL = {"prompt": "a red circle moving right on a blue background", "width": 64, "height": 64, "frames": 5, "steps": 2}
TINY = LoadOptions(model="tiny", device="cpu")


class TwoHosts(WorkerProcesses):
    """Half of the ranks under a supervisor of their own, which is told where to meet."""

    def __init__(self, options: WorkerOptions) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        here = Meeting("127.0.0.1", listening.getsockname()[1], nodes=2)
        half = replace(options, devices=options.devices[::2], mesh="auto")
        joined = {"run_id": "two-hosts", "interface": "lo"}
        with listening:
            super().__init__(half, replace(here, descriptor=listening.fileno()), **joined)
        self.other = WorkerProcesses(half, replace(here, node=1), **joined)

    def kill(self) -> None:
        self.other.kill()
        super().kill()


@pytest.mark.parametrize("mesh", ["1x1x2", "2x1x2"])
def test_two_hosts_give_the_result_of_one_process(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is divided between them; all processes end with the program."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = Pipeline.load(TINY).generate(Request(**SMALL))
    others, ranks = below(os.getpid()), 4 if mesh == "2x1x2" else 2
    options = WorkerOptions(devices=("cpu",) * ranks, mesh=mesh, start_timeout=90, here=False)
    with forking(ranks // 2), Workers(options, TwoHosts) as workers:
        result = WorkerEngine(workers).generate(TINY, Request(**SMALL))
        processes = below(os.getpid()) - others
        assert len(processes) == 2 + ranks
    assert (result.latents - alone.latents).abs().max() <= 1e-5 * alone.latents.abs().max()
    assert np.abs(result.frames.astype(int) - alone.frames).max() <= 1
    assert result.report.settings["mesh"] == mesh
    wait_until_gone(processes)


def test_a_host_is_lost_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends in seconds, and the next request starts both hosts again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    others, lost = below(os.getpid()), 0.0
    options = WorkerOptions(devices=("cpu", "cpu"), mesh="1x1x2", start_timeout=90)

    def lose() -> None:
        nonlocal lost
        if not lost:
            lost = time.monotonic()
            assert isinstance(workers._processes, TwoHosts)
            supervisor = workers._processes.other.process.pid
            [rank] = [child for child, parent in parents().items() if parent == supervisor]
            for process in (supervisor, rank):
                os.kill(process, signal.SIGKILL)

    with forking(1), Workers(options, TwoHosts) as workers:
        request = Request(**SMALL | {"steps": 200})
        with pytest.raises(WorkerError, match=r"lost the connection|step \d+ of 200"):
            WorkerEngine(workers).generate(TINY, request, Watch(step=lambda progress, seconds: lose()))
        assert time.monotonic() - lost < 20
        result = WorkerEngine(workers).generate(TINY, Request(**SMALL))
        processes = below(os.getpid()) - others
    assert result.frames.shape[0] == 5
    wait_until_gone(processes)


def test_generate_with_gpus_writes_the_same_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    asked = ["generate", "--model", "tiny", "--prompt", SMALL["prompt"], "--size", "48x48", "--frames", "5"]
    asked += ["--steps", "4"]
    assert main([*asked, "--device", "cpu", "--out", "alone.mp4"]) == 0
    asked += ["--out", "together.mp4", "--report", "r.json"]
    with forking():
        assert main([*asked, "--gpus", "cpu,cpu", "--mesh", "1x1x2"]) == 0
    said = capsys.readouterr()
    assert "step   4/4" in said.err and "low noise" in said.err and "ulysses 2" in said.out
    alone, together = (read_video(tmp_path / name).astype(int) for name in ("alone.mp4", "together.mp4"))
    assert np.abs(alone - together).mean() < 1  # the video's own compression
    assert read_metadata(tmp_path / "together.mp4")["mesh"] == "1x1x2"
    assert json.loads((tmp_path / "r.json").read_text())["settings"]["mesh"] == "1x1x2"
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--mesh", "1x1x2"], "give --gpus as well"),
        (["--gpus", "cpu,cpu", "--device", "cpu"], "leave out --device"),
        (["--gpus", "99"], "torch finds"),
    ],
)
def test_options_that_do_not_fit(asked: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "tiny", "--prompt", "", *asked]) == 2
    assert message in capsys.readouterr().err
