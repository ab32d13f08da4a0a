"""Lists of videos on a Ray cluster: nodes that are killed and that join, a driver that is killed, faults of a line."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ROOT, Nodes
from tools.processes import wait_until
from wan_core.cli import main
from wan_core.cluster import lists
from wan_core.cluster.actors import VideoMaker
from wan_core.config.temporary import _root

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RUNS = int(os.environ.get("WANCORE_RAY_RUNS", "1"))  # of the longest test
STEPS = os.environ.get("WANCORE_RAY_STEPS", "1")
LONG = 100  # with so many the node that joins is there before the list ends
TINY = ["generate", "--model", "tiny", "--size", "32x32", "--frames", "5", "--steps", STEPS]


def write_list(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "list.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def made_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.mp4")}


def nothing_stays(nodes: Nodes) -> None:
    """No temporary file is on the nodes when a list has ended, of makers that Ray killed or whose nodes it lost."""
    wait_until(lambda: not [name for name in nodes.left_over() if name != own_name()], 30, "temporary files stay")


def own_name() -> str:
    """The folder of this process, the driver, which runs on."""
    return _root().name if _root.cache_info().currsize else ""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """64 videos of one rank on this machine."""
    folder = tmp_path_factory.mktemp("one")
    path = write_list(folder, [{"prompt": "a red circle", "seed": seed} for seed in range(64)])
    os.environ["OMP_NUM_THREADS"] = "1"
    assert main([*TINY, "--prompts", str(path), "--gpus", "cpu", "--out", str(folder / "o.mp4")]) == 0
    return made_in(folder)


@pytest.mark.parametrize("run", range(RUNS))
def test_a_node_is_killed_and_one_joins(
    run: int, nodes: Nodes, reference: dict[str, bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All videos are there, none was made twice, and each has the bytes of one rank's."""
    nodes.have(3)
    path = write_list(tmp_path, [{"prompt": "a red circle", "seed": seed} for seed in range(64)])
    out = tmp_path / "out"
    out.mkdir()
    command = [*TINY, "--prompts", str(path), "--out", str(out / "o.mp4")]
    codes: list[int] = []
    asked = [*command, "--ray", nodes.address, "--gpus", "cpu,cpu,cpu"]
    thread = threading.Thread(target=lambda: codes.append(main(asked)))
    thread.start()
    for count, act in ((21, nodes.kill), (32, nodes.add)):  # Ray starts nodes in the main thread alone
        wait_until(lambda count=count: len(made_in(out)) >= count, 600, "nothing is made")
        act()
    thread.join()
    said = capfd.readouterr()
    assert codes == [0] and "videos: 64 made" in said.out
    assert made_in(out) == reference
    assert len(list(out.iterdir())) == 128, "videos and reports, and no hidden file"
    finished = [line for line in said.err.splitlines() if " of 64: " in line]
    names = Counter(line.split(": ")[1].split(" ")[0] for line in finished)
    assert len(names) == 64 and set(names.values()) == {1}
    added = list(nodes.cpus)[-1].node_id[:6]
    joined = sum(f"node {added}" in line for line in finished)
    with capfd.disabled():
        print(f"\nthe node that joined made {joined} videos")
    nothing_stays(nodes)
    assert joined or int(STEPS) < LONG, "a list of one step ends before a node has started"


def test_the_driver_is_killed(nodes: Nodes, reference: dict[str, bytes], tmp_path: Path) -> None:
    """The same command makes only what is missing."""
    nodes.have(2)
    path = write_list(tmp_path, [{"prompt": "a red circle", "seed": seed} for seed in range(12)])
    command = [*TINY, "--prompts", str(path), "--out", str(tmp_path / "o.mp4"), "--gpus", "cpu,cpu"]
    command = [sys.executable, "-m", "wan_core", *command, "--ray", nodes.address]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: len(list(tmp_path.glob("*.mp4"))) >= 4, 600, "nothing is made")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.mp4")}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stderr
    assert f"videos: {12 - len(times)} made, {len(times)} were there before" in again.stdout
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in times} == times
    assert made_in(tmp_path) == {name: reference[name] for name in sorted(reference)[:12]}
    nothing_stays(nodes)
    assert len(list(tmp_path.glob(".*"))) == 0


class Fails(VideoMaker):
    """Loses the video of seed 1, whoever makes it."""

    def make(self, loaded: Any, request: Any, media: Any, key: str) -> dict[str, Any]:
        return {"lost": "its rank ended"} if request["seed"] == 1 else super().make(loaded, request, media, key)


class Dry(VideoMaker):
    """Makes nothing, at once."""

    def check(self, loaded: Any, request: Any, media: Any) -> dict[str, Any]:
        return {"notes": []}

    def make(self, loaded: Any, request: Any, media: Any, key: str) -> dict[str, Any]:
        return {"video": b"", "report": b""}


def send(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """The nodes get this class in the place of `VideoMaker`."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(lists, "VideoMaker", kind)


def test_faults(
    nodes: Nodes, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that cannot run is refused before work; a video that is lost twice is given up and the others are made; a
    disk that is full stops the list."""
    nodes.have(2)
    command = [*TINY, "--out", str(tmp_path / "o.mp4"), "--gpus", "cpu,cpu", "--ray", nodes.address]
    bad = write_list(tmp_path, [{"prompt": "a red circle"}, {"prompt": "x", "image": str(ROOT / "README.md")}])
    assert main([*command, "--prompts", str(bad)]) == 2
    assert "line 2 of" in capfd.readouterr().err
    path = write_list(tmp_path, [{"prompt": "a red circle", "seed": seed} for seed in range(3)])
    send(monkeypatch, Fails)
    assert main([*command, "--prompts", str(path)]) == 1
    said = capfd.readouterr()
    assert "not made are lines 2" in said.err and said.err.count("lost it and it will be made again") == 1
    assert sorted(made_in(tmp_path)) == ["o-0001.mp4", "o-0003.mp4"]
    send(monkeypatch, Dry)

    def full(path: Path, *_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(lists, "write_bytes", full)
    command[command.index(str(tmp_path / "o.mp4"))] = str(tmp_path / "p.mp4")
    assert main([*command, "--prompts", str(path)]) == 1
    assert "No space left on device" in capfd.readouterr().err
    assert not list(tmp_path.glob("p*")) and not list(tmp_path.glob(".*"))


VIDEO_SECONDS, VIDEOS = 3.0, 12  # of a maker that only waits
