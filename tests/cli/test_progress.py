"""What a run shows while it goes on."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from wan_core.cli import main, progress
from wan_core.cli.progress import ProgressLine
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.steps import Step

PLAN = make_plan(task="t2v-A14B", steps=8, guidance_high=1.0, guidance_low=1.0)
GENERATE = ["generate", "--model", "tiny", "--steps", "2", "--frames", "5", "--size", "64x64", "--device", "cpu"]
CAPTION = "a red circle moving right on a blue background"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Done:
    """Stand-in for `denoise.Progress`."""

    step: Step
    plan: Plan = PLAN
    clip: tuple[int, int] = (1, 1)

    def left(self, seconds: float) -> float:
        return self.plan.left(self.step, seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def shown(monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO] = Terminal) -> tuple[ProgressLine, io.StringIO]:
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    return ProgressLine(), stream


def test_time_left_is_averaged_without_the_first_step(clock, monkeypatch) -> None:
    line, stream = shown(monkeypatch, io.StringIO)
    line.planned(PLAN)
    line.phase("denoise")
    assert "step   0/8  running the first" in stream.getvalue()
    for index, seconds in enumerate((100.0, 1.0, 3.0)):
        clock[0] += seconds
        line.step(Done(PLAN.steps[index]), seconds)
    lines = stream.getvalue().splitlines()
    assert "1:40 elapsed, 11:40 left  100.000 s/step" in lines[-3]  # nothing else is known yet
    assert "step   3/8" in lines[-1] and "1:44 elapsed, 0:10 left  2.000 s/step" in lines[-1]


def test_loading_and_decoding_have_progress(clock, monkeypatch) -> None:
    line, stream = shown(monkeypatch)
    parts = {"high": SimpleNamespace(stored_bytes=3 << 30), "vae": SimpleNamespace(stored_bytes=1 << 30)}
    line.found(SimpleNamespace(of=parts))
    for _ in range(4):
        clock[0] += 1
        line.read(1 << 30)
    assert "load 4.00 GiB" in stream.getvalue() and "load  50 %  2.00 GiB  0:02 elapsed" in stream.getvalue()
    line.phase("decode")

    def frames() -> Any:
        for index in range(10):
            clock[0] += 1
            yield index

    assert list(line.frames(frames(), 10)) == list(range(10))
    assert "frame   5/10  0:09 elapsed, 0:05 left" in stream.getvalue() and "frame  10/10" in stream.getvalue()


def test_a_random_seed_is_printed_and_kept(tmp_path, capsys) -> None:
    import json

    seeds = set()
    for name in ("one", "two"):
        report = tmp_path / f"{name}.json"
        files = ["--out", str(tmp_path / f"{name}.mp4"), "--report", str(report)]
        assert main([*GENERATE, "--prompt", CAPTION, "--seed", "random", *files]) == 0
        printed, seed = capsys.readouterr(), json.loads(report.read_text())["settings"]["seed"]
        assert f"seed {seed}" in printed.err and f"seed {seed}" in printed.out
        assert "load 0.0" in printed.err and "frame   5/5" in printed.err and "step   0/2" in printed.err
        seeds.add(seed)
    assert len(seeds) == 2
