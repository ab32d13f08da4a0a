"""Suite `tests`: the project's own tests on this machine, a row for each file, written again as each test ends.

    python -m benchmarks tests --setting "gpu tests"              # pytest -m gpu, of the files that have such tests
    python -m benchmarks tests --setting "gpu tests/ops"          # of those below tests/ops

A setting is a mark and where to look. Three processes run the tests. seconds: of the tests of
the file so far; passed, skipped; a file with a failure is a row that failed. `over`: whether the run came to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.rows import Row

ROOT = Path(__file__).parents[1]
PROCESSES = 3
NOTHING_CHOSEN = 5  # pytest's exit status


def tests_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    for setting in options.setting or ("gpu tests",):
        mark, *where = shlex.split(setting)
        files = marked_files(mark, where)
        if not files:
            yield {"name": setting, "size": "", "failed": f"no file below {', '.join(where)} has tests marked {mark}"}
            continue
        yield from run_tests(setting, mark, files, details)


def marked_files(mark: str, where: Sequence[str]) -> list[str]:
    """The test files at or below `where` that name the mark; for an expression, all of them. Files that need libraries
    which this machine lacks are not even imported where they have no such tests."""
    found = [path for place in where for path in sorted((ROOT / place).rglob("test_*.py"))]
    found += [ROOT / place for place in where if (ROOT / place).is_file()]
    if mark.isidentifier():
        found = [path for path in found if f"mark.{mark}" in path.read_text(encoding="utf-8")]
    return [str(path.relative_to(ROOT)) for path in found]


def run_tests(setting: str, mark: str, files: Sequence[str], details: dict[str, Any]) -> Iterator[Row]:
    """Rows of the files, again as each test ends: all tests side by side, then those that are marked `alone`."""
    rows: dict[str, Row] = {}
    details["over"] = False
    for tests, processes in ((f"({mark}) and not alone", PROCESSES), (f"({mark}) and alone", 0)):
        code, said = yield from run_pytest(tests, files, rows, processes)
        if code not in (0, 1, NOTHING_CHOSEN):
            yield {"name": setting, "size": "", "failed": f"pytest ended with {code}: {said}"}
            return
    details["over"] = True
    if not rows:
        yield {"name": setting, "size": "", "failed": f"no test below {', '.join(files)} is {mark}"}


def run_pytest(
    mark: str, files: Sequence[str], rows: dict[str, Row], processes: int
) -> Generator[Row, None, tuple[int, str]]:
    """Rows of the files as each test of the mark ends. Returns pytest's exit status and the end of what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    with TemporaryDirectory() as folder:
        read, write = os.pipe()
        command = [sys.executable, "-m", "pytest", "-q", "-m", mark, *files, "-p", "benchmarks.test_lines"]
        command += ["-n", str(processes), "--dist", "worksteal"] if find_spec("xdist") else []
        printed = Path(folder, "printed")
        with printed.open("w") as output:
            tests = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, pass_fds=[write],
                env={**environment, "WANCORE_TEST_LINES": str(write)},
            )  # fmt: skip
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                yield file_row(rows, json.loads(line))
        return tests.wait(), printed.read_text(errors="replace").strip()[-300:]


def file_row(rows: dict[str, Row], test: dict[str, Any]) -> Row:
    """The row of a test's file with that test counted in."""
    row = rows.setdefault(
        test["file"], {"name": test["file"], "size": "", "seconds": 0.0, "passed": 0, "skipped": 0, "faults": 0}
    )
    row["seconds"] = round(row["seconds"] + test["seconds"], 2)
    if test["outcome"] == "failed":
        row["faults"] += 1
        row["failed"] = f"{test['name']}: {test['message']}"[:300]
    elif test["when"] == "call" or test["outcome"] == "skipped":
        row[test["outcome"]] += 1
    return dict(row)
