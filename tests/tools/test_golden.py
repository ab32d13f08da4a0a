"""`tools.golden`: its tables, what a comparison notices, and a recording of a few commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.golden.compare import FILE, compare, differences, read, write
from tools.golden.doors import disagreements, table
from tools.golden.environment import ROOT
from tools.golden.files import MODELS, shapes_of
from tools.golden.graphs import door
from tools.golden.options import COUNT, command_line, option_sets
from tools.golden.record import read_lines

# Records command lines that need no torch: names and lines as a JSON object.
RECORD = """
import json, sys
from functools import partial
from pathlib import Path
from tools.golden.commands import line_case, run_all
from tools.golden.compare import write

work, out = Path(sys.argv[1]), Path(sys.argv[2])
(work / "files").mkdir(parents=True)
cases = {name: partial(line_case, line, work / "files", plain=True) for name, line in json.loads(sys.argv[3]).items()}
write(out, {"only": "*"}, run_all(cases, work, 2))
"""
LINES = {
    "doors/plan": "plan --task t2v-tiny --steps 3", "messages/steps": "plan --steps 0", "messages/nothing": "nothing",
    "help/check": "check --help",
}  # fmt: skip


def recorded(folder: Path, **other: str) -> Path:
    """other: lines in place of those of the same name after the slash, as if the product had changed."""
    lines = {name: other.get(name.partition("/")[2], line) for name, line in LINES.items()}
    command = [sys.executable, "-c", RECORD, str(folder / "work"), str(folder / "out"), json.dumps(lines)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("golden"))


def test_a_recording_is_the_same_again_and_keeps_exit_code_and_text(plain: Path, tmp_path: Path) -> None:
    again = recorded(tmp_path)
    assert (plain / FILE).read_bytes() == (again / FILE).read_bytes()
    assert compare(plain, again, "*") == 0
    cases = {name: case["command 1"] for name, case in read(plain).items()}
    assert {name: case["exit"] for name, case in cases.items()} == {name: 2 * ("mess" in name) for name in LINES}
    assert "boundary 0.875" in cases["doors/plan"]["out"] and "steps 0 given" in cases["messages/steps"]["err"]
    assert cases["help/check"]["out"].startswith("usage: python -m wan_core check")


def test_a_changed_plan_refusal_and_help_are_noticed(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = recorded(tmp_path, plan="plan --task t2v-tiny --steps 3 --shift 6 --json", steps="plan --steps 0.5")
    assert compare(plain, changed, "*") == 1
    told = capsys.readouterr().out
    assert "shift" in told and "steps 0 given" in told and "0.5" in told
    assert "2 differences" in told and "help/check" not in told
    assert compare(plain, changed, "help/*") == 0


def numbers(**changed: Any) -> dict[str, Any]:
    own = {"sha256": "a", "shape": [2], "dtype": "float32", "mean, std, min, max": [0, 1, -1, 1], "samples": [0.5, 2.0]}
    return {**own, **changed}


def test_differences_say_where_and_how_much() -> None:
    old = {"files": {"l": {"latents": numbers()}}, "out": "one\ntwo", "exit": 0, "list": [1, 2]}
    new = {"files": {"l": {"latents": numbers(sha256="b", samples=[0.5, 2.25])}}, "out": "one\nthree", "exit": 2}
    lines = differences(old, new)
    assert lines[0].startswith("files > l > latents: other numbers: of 12 samples the largest difference is 0.25")
    assert lines[1:4] == ["out:", "  - two", "  + three"] and lines[4:] == ["exit: 0 -> 2", "list: [1, 2] -> nothing"]
    assert differences(old, json.loads(json.dumps(old))) == []
    other = numbers(sha256="b", shape=[3])
    assert differences({"a": numbers()}, {"a": other}) == ["a: shape [2] -> [3]"]


def test_cases_that_are_gone_or_new_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", {"only": "*"}, {"x/1": {}, "x/2": {}, "y/1": {}})
    write(tmp_path / "b", {"only": "*"}, {"x/1": {}, "x/3": {}, "y/1": {}})
    assert compare(tmp_path / "a", tmp_path / "b", "*") == 1
    assert "x/2" in capsys.readouterr().out
    assert compare(tmp_path / "a", tmp_path / "b", "y/*") == 0
    assert compare(tmp_path / "a", tmp_path / "b", "z/*") == 1, "nothing compared is no agreement"
    write(tmp_path / "part", {"only": "y/*"}, {"y/1": {}})
    assert compare(tmp_path / "a", tmp_path / "part", "*") == 0, "only what both were asked for"


def accepted(line: str) -> dict[str, Any]:
    return {"command 1": {"exit": 0, "out": f"{line}, 4 forwards\nstep"}, "files": {}}


def refused(message: str) -> dict[str, Any]:
    return {"command 1": {"exit": 2, "err": f"python -m wan_core plan: {message}\n"}, "files": {}}


def test_doors_that_disagree_are_listed_with_an_example() -> None:
    shown = {"WanCorePlanPreview door": {"text": ["t2v: 3 steps, 6 forwards\nmore"]}}
    cases = {
        "doors/t2v --a/plan": accepted("t2v: 3 steps"), "doors/t2v --a/generate": refused("--a 7 given"),
        "doors/t2v --b/plan": refused("argument --b: b 7 given"), "doors/t2v --b/generate": refused("--b b 7 given"),
        "doors/t2v --c/plan": accepted("t2v: 2 steps"), "doors/t2v --c/preview": shown,
        "doors/t2v --d/sampler": {"failed": "WanCoreSampler: too many"}, "doors/t2v --d/preview": shown,
        "messages/x": {},
    }  # fmt: skip
    examples = {(one[:3], one[3]) for one in disagreements(cases)}
    assert examples == {
        (("plan", "generate", "second refuses"), "t2v --a"), (("plan", "preview", "other plan"), "t2v --c"),
        (("sampler", "preview", "first refuses"), "t2v --d"),
    }  # fmt: skip
    assert "| plan, generate |  | 1 |" in table(cases) and "too many" in table(cases)


def test_the_tables_cover_every_group_and_are_the_same_each_time() -> None:
    lines = read_lines()
    assert len(lines) > 500 and {name.partition("/")[0] for name in lines} == {"videos", "ranks", "messages", "help"}
    assert not [line for line in lines.values() if "$" in line]
    assert lines["videos/generate $KEPT --out v $TINY --steps 4"].endswith("--size 64x48 --frames 9 --steps 4")
    sets = option_sets()
    assert sets == option_sets() and len(sets) > COUNT and len({one.name for one in sets}) == len(sets)
    assert all(shapes_of(shapes) for shapes in MODELS.values())


def test_a_door_is_told_of_every_row_or_left_out() -> None:
    info = json.loads((ROOT / "tests/nodes/node_schemas.json").read_text())
    offered = {
        name: {"input": {"required": {one["name"]: [] for one in node["inputs"]}}} for name, node in info.items()
    }
    counts = dict.fromkeys(("sampler", "preview", "calibrate", "native"), 0)
    for one in option_sets():
        for name in counts:
            graph = door(name, one, offered)
            if graph is not None:
                counts[name] += 1
                links = [v[0] for node in graph.values() for v in node["inputs"].values() if isinstance(v, list)]
                assert graph.keys() >= set(links)
                kinds = {row.kind for row in one.rows if str(row.kind).startswith("WanCore")}
                shown = {node["class_type"] for node in graph.values()}
                assert kinds <= shown, f"{name} is not told all of {one.name}"
        assert command_line(one, set()) == (None if one.rows else "")
    assert min(counts.values()) > 50, counts
