"""`tools.soak`: what it calls a violation, and a short run in a real ComfyUI."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tests.comfyui import find_comfyui
from tools.soak import Observed, check_memory, check_outputs, main
from tools.soak_prompts import Prompt


def seen(base: Path, **fields: Any) -> Observed:
    (base / "tmp").mkdir(parents=True, exist_ok=True)
    (base / "output").mkdir(exist_ok=True)
    return Observed(SimpleNamespace(base=base), **fields)  # type: ignore[arg-type]  # a server is only asked for its folder


@pytest.mark.parametrize(("last", "violations"), [(1009, 0), (1011, 1), (989, 1)])
def test_memory_may_change_by_one_percent(tmp_path: Path, last: int, violations: int) -> None:
    mib = 2**20
    observed = seen(tmp_path, memory=[500 * mib] * 5 + [1000 * mib] * 5 + [1500 * mib] * 5 + [last * mib] * 5)
    row = check_memory(observed, 5, 0.01)
    assert len(observed.violations) == violations
    assert row["medians_mib"] == [500, 1000, 1500, last] and row["change"] == pytest.approx(last / 1000 - 1)


def test_outputs_that_cannot_be_read_and_files_that_nobody_named(tmp_path: Path) -> None:
    pictures = [tmp_path / "output" / f"{n}.png" for n in range(2)]
    observed = seen(tmp_path, outputs=[(Prompt("text to video", {}, (4, 2, 2)), pictures)])
    for path in pictures:
        picture = Image.new("RGB", (4, 2))
        picture.putpixel((1, 1), (9, 9, 9))
        picture.save(path)
    assert check_outputs(observed) == {"outputs": 2, "unreadable": 0, "files_left": 0}
    pictures[1].write_bytes(b"")
    (tmp_path / "output" / ".x.mp4.1-2.part").touch()
    (tmp_path / "tmp" / "log").touch()
    assert check_outputs(observed) == {"outputs": 2, "unreadable": 1, "files_left": 2}
    assert len(observed.violations) == 2 and ".part" in observed.violations[1] and "tmp/log" in observed.violations[1]


@pytest.mark.comfy
def test_a_short_run_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    find_comfyui()  # or skip
    result = tmp_path / "result.json"
    few = ["--prompts", "30", "--worker-prompts", "20", "--tolerance", "0.05", "--out", str(result)]
    assert main(few) == 0, capsys.readouterr().out
    alone, together = json.loads(result.read_text())["rows"]
    assert alone["completed"] == 27 and alone["interrupted"] + alone["refused"] + alone["failed"] == 3
    assert alone["outputs"] > 0 and together["workers_killed"] == 1 and together["processes_left"] == 0
