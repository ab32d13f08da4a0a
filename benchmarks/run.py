"""Run what was asked for, print it as a table, write it as JSON: anew after every row, so that none is lost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import attention_rows
from benchmarks.cases import parse_size
from benchmarks.everyday import everyday_rows
from benchmarks.official import official_rows
from benchmarks.options import CPU_SIZE, SUITES, check_names
from benchmarks.own_tests import tests_rows
from benchmarks.peers import PEERS, peer_versions
from benchmarks.rows import Row, table
from benchmarks.setups import find_setup
from benchmarks.single import single_rows
from benchmarks.small import small_rows
from benchmarks.videos import videos_rows
from wan_core.config import OptionError
from wan_core.config.outputs import Outputs
from wan_core.pipeline.settings import choose_device
from wan_lab.results import envelope, result_path, write_result

Rows = Callable[[str, list[str], torch.device, argparse.Namespace, dict[str, Any]], Iterator[Row]]
"""(model, sizes, device, options, details) -> rows; `details` is what else goes into the file."""

MEASURES: dict[str, Rows] = {
    "single": single_rows,
    "attention": attention_rows,
    "everyday": everyday_rows,
    "templates": official_rows,
    "videos": videos_rows,
    "small": small_rows,
    "tests": tests_rows,
}


def run_bench(options: argparse.Namespace) -> int:
    """0, or 1 if a row failed. Raises OptionError before any work for what cannot be measured."""
    check_options(options)
    device = choose_device(options.device)
    name = options.model or ("random:t2v-A14B" if device.type == "cuda" else "tiny")
    suite = options.suite
    sizes = options.size or (list(SUITES[suite].sizes) if device.type == "cuda" else [CPU_SIZE])
    with Outputs({"--model": options.model}, overwrite=options.overwrite, tell=tell) as outputs:
        path = None
        if options.out is not None:
            named = result_path(options.out, suite, device)
            # The name in a folder is of this day alone: a second run of the day replaces it.
            path = outputs.add("--out", named, overwrite=None if named == options.out else True)
        return measure(options, device, name, suite, sizes, path)


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def measure(
    options: argparse.Namespace, device: torch.device, name: str, suite: str, sizes: list[str], path: Path | None
) -> int:
    """Measure the rows, write them to `path`, print them. 1 if a row failed."""
    rows: list[Row] = []
    details: dict[str, Any] = {"model": name}
    for row in MEASURES[suite](name, sizes, device, options, details):
        tell(str(row))
        # A suite may give a row again: after each round, after each test.
        rows = [one for one in rows if (one["name"], one["size"]) != (row["name"], row["size"])] + [row]
        rows.sort(key=lambda row: sizes.index(row["size"]) if row["size"] in sizes else len(sizes))
        write(path, suite, device, rows, details)
    write(path, suite, device, rows, details)  # what a suite knows only when it is over
    print(table(rows))
    if path is not None:
        print(path)
    return int(any("failed" in row for row in rows))


def write(path: Path | None, suite: str, device: torch.device, rows: list[Row], details: dict[str, Any]) -> None:
    if path is not None:
        result = envelope(suite, device, rows, program="benchmarks") | details
        result["versions"] |= peer_versions({row["name"] for row in rows})
        write_result(result, path)


def check_options(options: argparse.Namespace) -> None:
    """Raise OptionError for what would fail after the model was made."""
    suite = SUITES[options.suite]
    for size in options.size or ():
        parse_size(size)
    if suite.parts:
        check_names("setting", options.setting or (), suite.parts, options.suite)
    if options.suite == "single":
        for setup in {*(options.setup or ())} - PEERS.keys():
            find_setup(setup)
    for number in ("runs", "layers", "steps", "gpus"):
        value = getattr(options, number, None)
        least = suite.fewest_runs if number == "runs" else 1
        if value is not None and value < least:
            raise OptionError(f"{number} {value} given; it must be at least {least}")
