"""tools/readme_tables.py: what it writes, what it leaves alone, and when it says that a page is stale."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.readme_tables import ROOT, VERSION, TableError, body_of, cell, main, newest_result, rewrite
from tools.summary_tables import TABLES
from wan_core.sampling.cache.arguments import SPEEDS

ROWS = [
    {"name": "ours", "size": "720p", "seconds": 9.2345, "ratio": 1.254, "ratio_to": "peer", "peak_gib": None},
    {"name": "peer | eager", "size": "720p", "seconds": 11.58, "tokens": 75600},
]


def write(root: Path, suite: str, device: str, date: str, rows: list[dict] = ROWS) -> None:
    folder = root / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    result = {"suite": suite, "command": "make bench", "commit": "0123456789abcdef", "device": device}
    result |= {"versions": {"torch": "2.13.0"}, "version": VERSION, "rows": rows}
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
    assert lines[6] == "h200; torch 2.13.0; commit 0123456789ab: `make bench`"


def test_rows_of_another_version_say_their_date_and_commit(tmp_path: Path) -> None:
    write(tmp_path, "forward", "h200", "20261120", [ROWS[0], ROWS[1] | {"commit": "fedcba9"}])
    path = tmp_path / "benchmarks/results/forward-h200-20261120.json"
    path.write_text(path.read_text().replace(f'"version": "{VERSION}"', '"version": "0.0.1"'))
    lines = rewrite(region("forward"), tmp_path / "benchmarks" / "results")[0].splitlines()
    assert [line.split(" | ")[-1] for line in lines[1:5:2]] == ["measured |", "2026-11-20 0123456789ab |"]
    assert lines[4].endswith("| 75600 | 2026-11-20 fedcba9 |")


def test_results_of_the_ladder_stand_under_their_tables_and_the_archive_is_not_read(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    body = body_of("ladder", tmp_path)
    assert body.startswith("Not measured yet:") and "`on-640`" in body
    for date, name in (("20261120", "older"), ("20261121", "newer")):
        write(tmp_path, "on-640", "h100", date, [{"name": name, "size": "", "seconds": 2.0}])
        path = results / f"on-640-h100-{date}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"job": "on-640", "suite": "everyday"}))
    write(tmp_path, "attention", "h200", "20261121")
    (results / "archive").mkdir()
    (results / "attention-h200-20261121.json").rename(results / "archive" / "attention-h200-20261121.json")
    text = body_of("ladder", results)
    assert text.startswith("**ComfyUI's template from click to file") and "| newer |" in text and "older" not in text
    assert "`on-640`" not in text and "`attention`" in text
    assert newest_result("on-640", results)["rows"][0]["name"] == "newer"
    with pytest.raises(TableError, match="'everyday'"):
        newest_result("everyday", results)  # a job of the ladder is known by its own name alone


def test_rows_say_what_was_measured_and_what_is_exact_comes_first(tmp_path: Path) -> None:
    """Sparse rows have no error: on random weights leaving blocks out costs nothing."""
    rows = [
        {"name": "on: ours, fp8, sparse fast", "seconds": 1.0, "error": 0.03},
        {"name": "on: ours, fp8", "seconds": 2.0, "error": 0.06},
        {"name": "on: ours, auto", "seconds": 3.0, "error": 0.01},
        {"name": "off: native", "seconds": 9.0, "steps_measured": 2},
        {"name": "off: ours, cache", "seconds": 4.0, "layers": 40},
    ]
    write(tmp_path, "everyday", "h200", "20261120", rows)
    path = tmp_path / "benchmarks/results/everyday-h200-20261120.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers": 8}))
    lines = rewrite(region("everyday"), tmp_path / "benchmarks" / "results")[0].splitlines()
    assert lines[3:8] == [
        "| on: ours, auto (8 of 40 blocks) | 3 | 0.01 |",
        "| on: ours, fp8 (8 of 40 blocks) | 2 | 0.06 |",
        "| on: ours, fp8, sparse fast (8 of 40 blocks) | 1 |  |",
        "| off: native (8 of 40 blocks, scaled from 2 steps) | 9 |  |",
        "| off: ours, cache | 4 |  |",
    ]
    assert "says nothing about sparsity" in lines[9]


def test_a_row_that_was_not_measured_says_why(tmp_path: Path) -> None:
    rows = [
        {"name": "ours", "size": "480p", "seconds": 2.0, "tflops": 700.0, "tokens": 32760, "compilations": 1},
        {"name": "other", "size": "480p", "why_not": "needs a | GPU"},
        {"name": "third", "size": "480p", "failed": "out of memory"},
    ]
    write(tmp_path, "single", "h200", "20261120", rows)
    path = tmp_path / "benchmarks" / "results" / "single-h200-20261120.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peaks": {"bf16_tflops": 761.2, "copy_tb_s": 4.26}}))
    lines = rewrite(region("single"), tmp_path / "benchmarks" / "results")[0].splitlines()
    assert lines[1:6] == [
        "|  | size | seconds | TFLOP/s |",
        "|---|---|---:|---:|",
        "| ours | 480p | 2 | 700 |",
        "| other | 480p | *needs a \\| GPU* |  |",
        "| third | 480p | *out of memory* |  |",
    ]
    assert lines[8] == "Peaks measured in the same run: bf16 761 TFLOP/s, copy 4.26 TB/s."


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


# A table's own markers in the text around it are a different case: the test after this one.
prose = st.text(st.characters(codec="utf-8", exclude_characters="\r")).filter(
    lambda s: "<!--" not in s and "-->" not in s
)


@given(before=prose, stale=prose, between=prose, after=prose)
def test_only_regions_change_and_twice_is_once(tmp_path_factory, before, stale, between, after) -> None:
    root = tmp_path_factory.mktemp("readme")
    write(root, "forward", "h200", "20261120")
    results = root / "benchmarks" / "results"
    once, changed = rewrite(before + region("forward", stale) + between + region("forward") + after, results)
    assert changed == ["forward", "forward"]
    assert once.startswith(before)
    assert once.endswith(after)
    assert between in once
    assert rewrite(once, results) == (once, [])


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


@pytest.mark.parametrize("name", ["gains", "gains.zh"])
def test_short_tables_compare_two_rows_of_a_committed_result(name: str) -> None:
    lines = body_of(name, ROOT / "benchmarks" / "results").splitlines()
    assert len(lines) - 2 == len(TABLES[name.partition(".")[0]]) <= 8 and "会变" not in lines[2] + lines[3]
    assert all("but for rounding" in line or "只差舍入" in line for line in lines[2:4])  # what is exact comes first
    for line in lines[2:]:
        before, after, ratio = (cell.strip() for cell in line.split("|")[2:5])
        assert float(before) / float(after) == pytest.approx(float(ratio), rel=0.02)


def test_short_tables_take_the_rows_of_the_ladder_where_it_has_them(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(ROOT / "benchmarks" / "results", results)
    names = {"on, new seed: native": 20.0, "on, new seed: native, accelerated, auto": 8.0}
    rows = [{"name": name, "size": "640x640x81", "seconds": seconds} for name, seconds in names.items()]
    result = {"suite": "everyday", "job": "on-640-native", "version": VERSION, "device": "NVIDIA H100", "rows": rows}
    result |= {"command": "c", "commit": "abc", "versions": {}}
    (results / "on-640-native-h100-20990101.json").write_text(json.dumps(result), encoding="utf-8")
    line, *others = body_of("gains", results).splitlines()[2:]
    assert "| 20 | 8 | 2.50 | the same but for rounding |  |" in line
    assert all(re.search(r"\| 20\d\d-\d\d-\d\d [0-9a-f]{7} \|$", other) for other in others)


def test_four_gpus_on_paper_are_sums_of_measured_parts() -> None:
    lines = body_of("waterfall", ROOT / "benchmarks" / "results").splitlines()
    assert len(lines) == 4
    for line in lines[2:]:
        one, share, denoising, decoding, warm, goal, cold = (cell.strip() for cell in line.split("|")[2:9])
        assert float(denoising) == pytest.approx(float(one) / float(share), rel=0.01)
        assert float(denoising) + float(decoding) < float(warm) < float(cold)
        assert not goal or float(warm) < float(goal)


def test_a_short_table_names_the_row_that_is_missing(tmp_path: Path) -> None:
    write(tmp_path, "everyday", "h200", "20261122")
    with pytest.raises(TableError, match=r"'gains'.*on, new seed: native.*newest result lacks"):
        body_of("gains", tmp_path / "benchmarks" / "results")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04478, "0.0448"), (123456.0, "123456"), (1.0, "1"), (0.0, "0.0"), (12, "12"), (2e-5, "2e-05")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert cell(value) == text


def test_presets_show_their_bounds() -> None:
    assert [line.split("`")[1] for line in body_of("bounds", ROOT / "x").splitlines()[2:]] == list(SPEEDS)
