"""Lists of videos: shared out over makers, made again where a rank is lost, and never
twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.forked import forking
from tools.processes import parents, wait_until
from wan_core.cli import main
from wan_core.config import OptionError, Request
from wan_core.config.outputs import Outputs
from wan_core.workers.launcher import WorkerError
from wan_core.workers.video_list import ATTEMPTS, LOSSES, ListedVideo, ListMakers, Maker, VideoList, make_all

TINY = ["generate", "--model", "tiny", "--size", "32x32", "--frames", "5", "--steps", "1"]


def write_list(folder: Path, *lines: Any) -> Path:
    path = folder / "list.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


# ------------------------------------------------------------------------------------------------------- who makes what


class Losing(Maker):
    """A maker that loses some videos, at its first tries or always, and refuses others."""

    def __init__(self, name: str, losses: dict[int, int], refuses: set[int], made_videos: Counter[int]) -> None:
        super().__init__(name, self.made_or_lost)
        self.losses, self.refuses, self.made = losses, refuses, made_videos

    def made_or_lost(self, video: ListedVideo) -> None:
        time.sleep(0)  # others may go first
        if video.line in self.refuses:
            raise OptionError("refused")
        if self.losses.get(video.line, 0) > 0:
            self.losses[video.line] -= 1
            raise WorkerError("lost")
        video.out.write_text(video.key)
        self.made[video.line] += 1


@settings(max_examples=15)
@example(count=3, makers=1, losses=[{1: 2, 2: 1}, {}, {}, {}], refuses=set(), there={3})
@given(
    count=st.integers(1, 9),
    makers=st.integers(1, 4),
    losses=st.lists(st.dictionaries(st.integers(1, 9), st.integers(1, 3), max_size=4), min_size=4, max_size=4),
    refuses=st.sets(st.integers(1, 9), max_size=2),
    there=st.sets(st.integers(1, 9), max_size=3),
)
def test_each_video_once(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    makers: int,
    losses: list[dict[int, int]],
    refuses: set[int],
    there: set[int],
) -> None:
    """Whatever is lost, each video is made once or given up for a reason; those of others are left as they are."""
    folder, made_videos = tmp_path_factory.mktemp("list"), Counter[int]()
    videos = [ListedVideo(i, Request(prompt="x"), folder / f"{i}.mp4", str(i)) for i in range(1, count + 1)]
    for video in videos:
        if video.line in there:
            video.out.write_text("another's")
    working = [Losing(f"maker {i}", dict(losses[i]), refuses, made_videos) for i in range(makers)]
    outcome = make_all(VideoList(videos, lambda v: v.out.exists()), ListMakers(working))
    assert all(number == 1 for number in made_videos.values())
    assert sorted(outcome.made) == sorted(made_videos)
    ended = sorted([*outcome.made, *outcome.elsewhere, *outcome.failed])
    assert ended == [video.line for video in videos], "each has one end"
    assert set(outcome.elsewhere) == there & set(range(1, count + 1))
    for line, why in outcome.failed.items():
        lost = sum(wanted.get(line, 0) for wanted in losses[:makers])
        assert "no maker is left" in why or (why == "refused" if line in refuses else lost >= ATTEMPTS)
    assert not list(folder.glob(".*")), "no claim is left"


def test_a_lost_video_goes_to_another_maker(tmp_path: Path) -> None:
    """One that loses all it is given stops after some, and every video is made by the other."""
    made_videos = Counter[int]()
    videos = [ListedVideo(i, Request(prompt="x"), tmp_path / f"{i}.mp4", str(i)) for i in range(1, 13)]
    broken = Losing("broken", dict.fromkeys(range(1, 13), 99), set(), made_videos)
    sound = Losing("sound", {}, set(), made_videos)
    told: list[str] = []
    outcome = make_all(VideoList(videos, lambda v: v.out.exists(), told.append), ListMakers([broken, sound]))
    assert sorted(outcome.made) == list(range(1, 13)) and not outcome.failed
    assert sum("broken lost it" in line for line in told) <= LOSSES


def test_a_name_that_another_run_writes(tmp_path: Path) -> None:
    """A list leaves it alone and says so; a single run that finds a list's claim takes another name."""
    videos = [ListedVideo(i, Request(prompt="x"), tmp_path / f"{i}.mp4", str(i)) for i in (1, 2)]
    made_videos = Counter[int]()

    def make(video: ListedVideo) -> None:
        Losing("", {}, set(), made_videos).make(video)
        with Outputs({}) as outputs:
            assert outputs.add("--out", video.out).name == f"{video.line}-1.mp4"

    with Outputs({}) as outputs:
        outputs.add("--out", videos[0].out)
        outcome = make_all(VideoList(videos, lambda v: v.out.exists()), ListMakers([Maker("one", make)]))
    assert outcome.made == [2] and "another run is writing" in outcome.failed[1]
    assert [path.name for path in tmp_path.iterdir()] == ["2.mp4"]


@pytest.mark.parametrize("finishes", [True, False])
def test_two_runs_of_one_list(tmp_path: Path, finishes: bool) -> None:
    """What another run was writing is waited for: it is made, or not made if that run ends without it."""
    videos = [ListedVideo(i, Request(prompt="x"), tmp_path / f"{i}.mp4", str(i)) for i in (1, 2)]
    begun, script = (
        tmp_path / "begun",
        f"""
import time
from pathlib import Path
from wan_core.config.outputs import make_claim
out = Path({str(videos[0].out)!r})
claim = make_claim(out)
Path({str(tmp_path / "begun")!r}).touch()
time.sleep(2)
if {finishes}:
    out.touch()
    claim.unlink()
""",
    )
    other = subprocess.Popen([sys.executable, "-c", script])
    wait_until(begun.exists, 60, "the other run has not begun")
    threading.Thread(target=other.wait).start()  # or the ended process is still there
    told: list[str] = []
    one = Maker("one", Losing("", {}, set(), Counter()).make)
    outcome = make_all(VideoList(videos, lambda v: v.out.exists(), told.append), ListMakers([one]))
    assert outcome.made == [2] and any("waiting for another run" in line for line in told)
    assert outcome.elsewhere == [1] * finishes and [*outcome.failed] == [1] * (not finishes)


# ---------------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2 of .*no JSON object"),
        ("{", "line 2 of .*no JSON object"),
        ({"seed": 1}, "line 2 of .*'prompt' is missing"),
        ({"prompt": "x", "stepz": 3}, "line 2 of .*'stepz' is not known; did you mean steps"),
        ('{"prompt": "x", "seed": 1, "seed": 2}', "line 2 of .*'seed' is there twice"),
        ({"prompt": "x", "seed": True}, "line 2 of .*'seed' is true; write a text or a number"),
        ({"prompt": "x", "frames": 6}, "line 2 of .*6 frames given"),
        ({"prompt": "x", "frames": 5.5}, "line 2 of .*--frames: '5.5' is no whole number"),
        ({"prompt": "x", "size": "big"}, "line 2 of .*'big' is not a size"),
        ({"prompt": "x", "out": "x.avi"}, "line 2 of .*only MP4"),
        ({"prompt": "x", "out": "o-0001.mp4"}, "line 2 of .*written by line 1 too"),
        ({"prompt": "x", "out": "nowhere/x.mp4"}, "nowhere.*Create the folder"),
        ({"prompt": "x", "image": "none.png"}, "line 2 of .*none.png"),
        ({"prompt": "x", "out": "a\0.mp4"}, r"line 2 of .*'out' is \"a\\u0000.mp4\": no name of a file"),
        ({"prompt": "x", "image": "a\ud800.png"}, "line 2 of .*'image' is .*no name of a file"),
        ('{"prompt": "x", "shift": NaN}', "line 2 of .*--shift: 'nan' is no number"),
    ],
)
def test_refused_before_work(
    line: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_list(tmp_path, {"prompt": "a red circle"}, line)
    assert main([*TINY, "--prompts", str(path), "--out", "o.mp4"]) == 2
    assert re.search(message, capfd.readouterr().err, re.DOTALL)
    assert [path.name for path in tmp_path.iterdir()] == ["list.jsonl"]


@pytest.mark.parametrize("option", [["--overwrite"], ["--report", "r.json"]])
def test_options_that_a_list_does_not_take(
    option: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_list(tmp_path, {"prompt": "a red circle"})
    assert main([*TINY, "--prompts", str(path), "--gpus", "cpu", *option]) == 2
    assert f"{option[0]} does not go with --prompts" in capfd.readouterr().err


def test_run_again_makes_what_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In this process: finished videos stay as they are, and one that is another's is never replaced."""
    lines = [{"prompt": "a red circle", "seed": seed} for seed in range(3)]
    command = [*TINY, "--prompts", str(write_list(tmp_path, *lines)), "--out", str(tmp_path / "o.mp4")]
    assert main(command) == 0
    first = {path.name: path.read_bytes() for path in sorted(tmp_path.glob("o-*"))}
    assert list(first) == [f"o-000{i}.{kind}" for i in (1, 2, 3) for kind in ("mp4", "report.json")]
    assert json.loads(first["o-0002.report.json"])["settings"]["seed"] == 1
    for name in ("o-0002.mp4", "o-0002.report.json"):
        (tmp_path / name).unlink()
    capfd.readouterr()
    assert main(command) == 0
    told = capfd.readouterr()
    assert "2 of 3 videos are there already" in told.err and "videos: 1 made, 2 were there before" in told.out
    again = {path.name: path.read_bytes() for path in sorted(tmp_path.glob("o-*"))}
    assert {n: b for n, b in again.items() if n != "o-0002.report.json"} == {
        n: b for n, b in first.items() if n != "o-0002.report.json"
    }
    assert main(command) == 0
    write_list(tmp_path, *lines[:2], {"prompt": "a blue square"})
    assert main(command) == 2
    assert "o-0003.mp4 exists and was not made by this line" in capfd.readouterr().err


def test_another_picture_under_the_same_name_is_another_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_list(tmp_path, {"prompt": "a red circle", "image": "a.png"})
    command = [*TINY, "--prompts", "list.jsonl", "--out", "o.mp4"]
    Image.new("RGB", (32, 32), "red").save("a.png")
    assert main(command) == main(command) == 0
    Image.new("RGB", (32, 32), "blue").save("a.png")
    assert main(command) == 2
    assert "o-0001.mp4 exists and was not made by this line" in capfd.readouterr().err


# --------------------------------------------------------------------------------------------------------- on ranks


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_a_rank_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two makers of a rank each, one killed midway: all videos are there, none twice, each as of one rank.
    That one has a process of its own too: what ran before in this one may change the last bit of a product."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    count = 4
    lines = [
        {"prompt": "a red circle", "seed": seed, "frames": 17, "size": "64x64", "steps": 6} for seed in range(count)
    ]
    path, here = write_list(tmp_path, *lines), os.getpid()
    videos_of_runs: dict[str, dict[str, bytes]] = {}
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: len(list((tmp_path / "two").glob("*.mp4"))) >= 1, 60, "nothing is made")
        supervisors = {child for child, parent in parents().items() if parent == here}
        killed.append(max(child for child, parent in parents().items() if parent in supervisors))
        os.kill(killed[0], signal.SIGKILL)

    for name, devices in (("one", "cpu"), ("two", "cpu,cpu")):
        (tmp_path / name).mkdir()
        thread = threading.Thread(target=kill if name == "two" else lambda: None)
        thread.start()
        command = [*TINY, "--prompts", str(path), "--gpus", devices, "--out", str(tmp_path / name / "o.mp4")]
        with forking(ranks=1):  # of each maker
            assert main(command) == 0
        thread.join()
        videos_of_runs[name] = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.suffix == ".mp4"}
        assert len(list((tmp_path / name).iterdir())) == 2 * count, "videos and reports, and no hidden file"
    assert killed and "lost it and it will be made again" in capfd.readouterr().err
    assert len(videos_of_runs["one"]) == count and videos_of_runs["two"].keys() == videos_of_runs["one"].keys()
    other = [name for name in videos_of_runs["one"] if videos_of_runs["two"][name] != videos_of_runs["one"][name]]
    assert len(other) <= 1, "nearly always no byte differs"
    for name in other:  # one was seen on a busy machine
        one, two = (frames(tmp_path / folder / name) for folder in videos_of_runs)
        assert one.shape == two.shape and np.abs(one - two).mean() < 0.5, name


def frames(path: Path) -> np.ndarray:
    """[F, H, W, 3] int16."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(np.int16)
