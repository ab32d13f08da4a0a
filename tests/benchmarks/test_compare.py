"""The suite that compares two checkouts: real processes, in turns, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.compare import HERE, in_turns, load_arguments


def test_this_checkout_compared_with_itself_is_identical(tmp_path: Path) -> None:
    path, other = tmp_path / "compare.json", tmp_path / "other"
    other.mkdir()
    (other / "wan_core").symlink_to(HERE / "wan_core", target_is_directory=True)
    arguments = ["--device", "cpu", "--model", "tiny", "--size", "48x48x5", "--runs", "2", "--steps", "3"]
    assert main(["compare", *arguments, "--checkout", str(other), "--out", str(path)]) == 0
    ours, theirs = json.loads(path.read_text())["rows"]
    assert ours["name"] == "fp32/sdpa, this" and theirs["name"] == ours["ratio_to"] == "fp32/sdpa, other"
    assert ours["identical"] and theirs["ratio"] == 1
    assert len(ours["turns"]) == 2 and min(ours["turns"]) > 0
    assert ours["ratio"] == pytest.approx(theirs["seconds"] / ours["seconds"], rel=1e-2)


class Recorded:
    """A side whose answers are given."""

    def __init__(self, name: str, asked: list[str], seconds: list[float], digest: str) -> None:
        self.name, self.asked, self.seconds, self.digest = name, asked, iter(seconds), digest

    def ask(self, request: dict[str, object]) -> dict[str, object]:
        self.asked.append(self.name)
        return {"seconds": [next(self.seconds)] * 2, "peak": 1 << 30, "digest": self.digest}


def test_sides_take_turns_and_the_first_turn_does_not_count() -> None:
    asked: list[str] = []
    sides = {"this": Recorded("a", asked, [9, 2, 4, 3], "x"), "old": Recorded("b", asked, [9, 5, 5, 8], "y")}
    rows = in_turns(sides, {}, 3)  # type: ignore[arg-type]
    assert asked == ["a", "b"] * 4
    assert rows["this"] == {"seconds": 3, "spread": 2, "turns": [2, 4, 3], "peak_gib": 1.0, "identical": False}
    assert rows["old"]["seconds"] == 5 and rows["old"]["turns"] == [5, 5, 8]


def test_what_fails_in_a_checkout_is_a_row_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wan_core").mkdir()
    (tmp_path / "wan_core" / "__init__.py").write_text("raise ImportError('broken checkout')\n")
    arguments = ["--device", "cpu", "--model", "tiny", "--size", "48x48x5", "--runs", "1", "--steps", "2"]
    assert main(["compare", *arguments, "--checkout", str(tmp_path)]) == 1
    assert "broken checkout" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no --checkout given"),
        (["--checkout", "/nowhere"], "no wan_core"),
        (["--checkout", str(HERE), "--setup", "fp9/sdpa"], "PRECISION/ATTENTION"),
        (["--checkout", str(HERE), "--setup", "fp8"], "PRECISION/ATTENTION"),
        (["--checkout", str(HERE), "--steps", "1"], "at least 2"),
        (["--checkout", str(HERE), "--model", "tiny", "--layers", "2"], "random:TASK"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--device", "cpu", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_setups_are_options_of_the_loader() -> None:
    arguments = load_arguments("fp8/cudnn-fp8/compile", "random:t2v-A14B", torch.device("cuda"), 8)
    assert arguments["model"] == "random:t2v-A14B:8" and arguments["compile"] == "blocks"
    assert (arguments["precision"], arguments["attention"]) == ("fp8", "cudnn-fp8")
