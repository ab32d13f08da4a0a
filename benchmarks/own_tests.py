"""Suite `tests`: the project's own tests on this machine, a row for each file.

    python -m benchmarks tests --setting "gpu tests"         # pytest -m gpu tests

A setting is a mark and what to run. seconds: of the tests of the file; passed, skipped; a file with a failure is a row
that failed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.rows import Row

ROOT = Path(__file__).parents[1]


def tests_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    for setting in options.setting or ("gpu tests",):
        mark, *where = shlex.split(setting)
        with TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "pytest", "-q", "-m", mark, *where, f"--junitxml={report}"]
            done = subprocess.run(
                [*command, "-o", "junit_family=xunit1"], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if not report.is_file():
                yield {"name": setting, "size": "", "failed": done.stdout.strip()[-300:]}
                continue
            yield from file_rows(ElementTree.parse(report).getroot())


def file_rows(report: ElementTree.Element) -> Iterator[Row]:
    files: dict[str, Row] = {}
    for case in report.iter("testcase"):
        path = case.get("file") or case.get("classname", "").replace(".", "/")
        row = files.setdefault(path, {"name": path, "size": "", "seconds": 0.0, "passed": 0, "skipped": 0})
        row["seconds"] = round(row["seconds"] + float(case.get("time", "0")), 2)
        faults = [child for child in case if child.tag in ("failure", "error")]
        skipped = any(child.tag == "skipped" for child in case)
        row["skipped"] += skipped
        row["passed"] += not skipped and not faults
        for fault in faults:
            row["failed"] = f"{case.get('name')}: {fault.get('message', '')}"[:300]
    yield from files.values()
