"""Workers from the command line, and on two hosts: here two launchers on one machine that share only a rendezvous."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.forked import Forked, forking
from tools.processes import below, wait_until_gone
from wan_core.cli import main
from wan_core.config import LoadOptions, Request
from wan_core.media.video import read_metadata, read_video
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY as TINY_FILES
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import WorkerError, Workers
from wan_core.workers.options import WorkerOptions

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"prompt": "a red circle moving right on a blue background", "width": 48, "height": 48, "frames": 5, "steps": 2}
DOC = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def further_host(port: int, name: str, ranks: int = 1, cwd: Path | None = None) -> subprocess.Popen[str]:
    """The torchrun command of docs/parallel.md for further hosts, with this machine's address and CPUs."""
    [line] = re.findall(r"^torchrun (.*)$", DOC.replace("\\\n", " "), re.MULTILINE)
    words = line.replace("HOST:PORT", f"127.0.0.1:{port}").replace("NAME", name).split()
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *words]
    command[command.index("--nproc-per-node") + 1] = str(ranks)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return Forked(
        [*command, "--devices", ",".join(["cpu"] * ranks)], cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True
    )


def test_two_hosts_give_the_result_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the program's host have the first numbers, and the others end with the program."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny, port = LoadOptions(model="tiny", device="cpu"), free_port()
    alone = Pipeline.load(tiny).generate(Request(**SMALL))
    others = below(os.getpid())
    other = further_host(port, "two-hosts", ranks=2)
    options = {"nodes": 2, "rendezvous": f"127.0.0.1:{port}", "run_id": "two-hosts", "mesh": "2x1x2"}
    processes: set[int] = set()
    try:
        with forking(), Workers(WorkerOptions(devices=("cpu", "cpu"), start_timeout=90, **options)) as workers:
            result = WorkerEngine(workers).generate(tiny, Request(**SMALL))
            processes = below(os.getpid()) - others
            assert len(processes) == 3 + 3
        assert (result.latents - alone.latents).abs().max() < 5e-4
        assert np.abs(result.frames.astype(int) - alone.frames).max() <= 1
        assert result.report.settings["mesh"] == "2x1x2"
        assert other.wait(30) == 0, other.communicate()[1]
    finally:
        other.kill()
    wait_until_gone(processes)


def test_a_file_that_one_host_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program names the rank of the other host and its reason, and all ranks end, in seconds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("here", "there"):
        shutil.copytree(TINY_FILES, tmp_path / name / "models")
    (tmp_path / "there" / "models" / "t2v_low.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path / "here")
    others, port = below(os.getpid()), free_port()
    other = further_host(port, "one-file", cwd=tmp_path / "there")
    options = {"nodes": 2, "rendezvous": f"127.0.0.1:{port}", "run_id": "one-file", "mesh": "1x1x2"}
    processes: set[int] = set()
    try:
        with forking(ranks=1), Workers(WorkerOptions(devices=("cpu",), start_timeout=90, **options)) as workers:
            WorkerEngine(workers).generate(LoadOptions(model="tiny", device="cpu"), Request(**SMALL))
            processes, begin = below(os.getpid()) - others, time.monotonic()
            files = {name: f"models/t2v_{name}.safetensors" for name in ("high", "low")}
            with pytest.raises(WorkerError, match=r"rank 1 on .* refused the request in .*t2v_low\.safetensors: "):
                WorkerEngine(workers).generate(LoadOptions(model="tiny", device="cpu", **files), Request(**SMALL))
            assert time.monotonic() - begin < 20
    finally:
        other.kill()
    wait_until_gone(processes)


def test_a_host_that_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    options, others = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}", "run_id": "alone"}, below(os.getpid())
    workers = Workers(WorkerOptions(devices=("cpu",), start_timeout=4, **options))
    with forking(), pytest.raises(WorkerError, match=r"not ready within 4 s|could not connect to each other"):
        WorkerEngine(workers).generate(LoadOptions(model="tiny"), Request(**SMALL))
    wait_until_gone(below(os.getpid()) - others)


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
    ("asked", "words"),
    [
        (["--mesh", "1x1x2"], "give --gpus as well"),
        (["--nnodes", "2"], "give --gpus as well"),
        (["--gpus", "cpu,cpu", "--device", "cpu"], "leave out --device"),
        (["--gpus", "99"], "torch finds"),
        (["--gpus", "cpu,cpu", "--mesh", "1x1x3"], "needs 3 ranks"),
        (["--gpus", "cpu", "--nnodes", "2"], "need a rendezvous"),
        (["--gpus", "cpu" + ",cpu" * 999], "1000 workers on the CPU given"),
    ],
)
def test_options_that_do_not_fit(asked: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "tiny", "--prompt", "", *asked]) == 2
    assert words in capsys.readouterr().err
