"""`python -m benchmarks SUITE`: measure on this machine, print a table, write JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.options import SUITES, add_bench_options
from wan_core.cli import report_faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite. Returns the exit code: 0 done, 1 a row failed, 2 a user error, 3 out of memory, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the engine and its peers.")
    parser.add_argument("suite", nargs="?", choices=tuple(SUITES), metavar="SUITE", help=suites_help())
    add_bench_options(parser)
    options = parser.parse_args(arguments)

    def run() -> int:
        from benchmarks.run import run_bench  # imports torch: not for `--help`

        return run_bench(options)

    return report_faults("benchmarks", run)


def suites_help() -> str:
    return "; ".join(f"{name}: {suite.summary}" for name, suite in SUITES.items())


if __name__ == "__main__":
    sys.exit(main())
