"""tools/readme_tables.py: what it writes, what it leaves alone, and when it says that a page is stale."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.measured import TABLES, TableError, newest_result
from tools.readme_tables import ROOT, body_of, main, rewrite

ROWS = [
    {"name": "ours", "size": "720p", "seconds": 9.2345, "ratio": 1.254, "ratio_to": "peer", "peak_gib": None},
    {"name": "peer | eager", "size": "720p", "seconds": 11.58, "tokens": 75600},
]


def write(root: Path, suite: str, device: str, date: str, rows: list[dict] = ROWS) -> None:
    folder = root / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    result = {"suite": suite, "command": "make bench", "commit": "0123456789abcdef", "device": device}
    result |= {"versions": {"torch": "2.13.0"}, "rows": rows}
    (folder / f"{suite}-{device}-{date}.json").write_text(json.dumps(result), encoding="utf-8")


def region(name: str, body: str = "") -> str:
    return f"<!-- bench:{name} -->\n{body}<!-- /bench -->"


def test_a_table_shows_the_filled_columns_of_every_row(tmp_path: Path) -> None:
    write(tmp_path, "forward", "h200", "20261120")
    text, changed = rewrite(region("forward"), tmp_path / "benchmarks" / "results")
    assert changed == ["forward"]
    lines = text.splitlines()
    assert lines[1:5] == [
        "|  | size | seconds | speed-up | over | tokens |",
        "|---|---|---:|---:|---|---:|",
        "| ours | 720p | 9.23 | 1.25 | peer |  |",
        "| peer \\| eager | 720p | 11.6 |  |  | 75600 |",
    ]
    assert lines[6] == "h200, 2026-11-20; torch 2.13.0; commit 0123456789ab: `make bench`"


def test_a_table_shows_the_rows_and_columns_that_it_declares(tmp_path: Path) -> None:
    rows = [
        {"name": "cold: native", "seconds": 9.0, "commit": "abc", "nodes": {"save": 2.0}, "steps_measured": 2},
        {"name": "cold: ours, cudnn-fp8", "seconds": 4.5, "commit": "def"},
        {"name": "cold: native, comfy kitchen attention", "seconds": 3.0, "commit": "def"},
    ]
    write(tmp_path, "everyday-cold", "h200", "20261120", rows)
    results = tmp_path / "benchmarks" / "results"
    with pytest.raises(TableError, match="the row 'cold: native'"):  # its name says that it was scaled
        body_of("first-video", results)
    del rows[0]["steps_measured"]
    write(tmp_path, "everyday-cold", "h200", "20261120", rows)
    lines = body_of("first-video", results).splitlines()
    assert lines[:4] == [
        "|  | seconds | save | over native | over INT8 |",
        "|---|---:|---:|---:|---:|",
        "| native | 9 | 2 | 1 | 0.333 |",  # 'cold: ' is before all of them
        "| ours, cudnn-fp8 | 4.5 |  | 2 | 0.667 |",
    ]
    assert "commit abc, def:" in lines[6]


def test_every_table_of_the_page_is_declared_and_shown() -> None:
    page, *others = (
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("benchmarks", "earlier", "quality")
    )
    shown = "".join((page, *others))
    assert set(re.findall("bench:([a-z0-9-]+) -->", shown)) == {*TABLES, "forty-steps"}
    assert len(page.splitlines()) <= 350
    dates = re.findall(r"(?m)^[^|`]*, (2026-\d\d-\d\d); python", page)
    assert dates and min(dates) >= "2026-11-27", "older rows stand in docs/earlier.md"


def test_the_newest_file_wins_and_a_device_can_be_named(tmp_path: Path) -> None:
    for device, date in (("cpu", "20270101"), ("h200", "20261231"), ("h200", "20261120")):
        write(tmp_path, "forward", device, date, [{"name": date, "seconds": 1.0}])
    write(tmp_path, "vae", "h200", "20280101")
    results = tmp_path / "benchmarks" / "results"
    assert newest_result("forward", results)["rows"][0]["name"] == "20270101"
    assert newest_result("forward-h200", results)["rows"][0]["name"] == "20261231"
    write(tmp_path, "forward", "h200", "20270101")
    with pytest.raises(TableError, match="forward-cpu, forward-h200"):
        newest_result("forward", results)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench:forward -->\n", "end each with"),
        ("<!-- bench:forward -->\n" + region("forward"), "end each with"),
        (region("absent"), "'absent'.*make bench"),
    ],
)
def test_errors_say_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "forward", "h200", "20261120")
    with pytest.raises(TableError, match=message):
        rewrite(text, tmp_path / "benchmarks" / "results")


@pytest.mark.parametrize("name", ["README.md", "README.zh.md", "docs/benchmarks.md"])
def test_check_fails_until_every_page_is_rewritten(name: str, tmp_path: Path, capsys) -> None:
    write(tmp_path, "forward", "h200", "20261120")
    page = tmp_path / name
    page.parent.mkdir(exist_ok=True)
    page.write_text("# Title\n" + region("forward"), encoding="utf-8")
    assert main(["--check"], root=tmp_path) == 1
    assert f"{name} is stale (forward)" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == "# Title\n" + region("forward")
    assert main([], root=tmp_path) == 0 == main(["--check"], root=tmp_path)
    write(tmp_path, "forward", "h200", "20261121", [{"name": "faster", "seconds": 1.0}])
    assert main(["--check"], root=tmp_path) == 1
