"""`python -m benchmarks SUITE`: measure on this machine, print a table, write JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.options import ARCHIVED, SUITES, add_bench_options
from wan_core.cli import report_faults

PROGRAM = "python -m benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite. Returns the exit code: 0 done, 1 a row failed, 2 a user error, 3 out of memory, 130 interrupted."""
    options = build_parser().parse_args(suite_first(sys.argv[1:] if arguments is None else arguments))

    def run() -> int:
        from benchmarks.run import run_bench  # imports torch: not for `--help`

        return run_bench(options)

    return report_faults(PROGRAM, run)


def build_parser() -> argparse.ArgumentParser:
    width = max(map(len, SUITES))
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s [SUITE] [options]",
        description="Measure the engine and its peers on this machine.",
        epilog="\n".join(
            [
                "suites:",
                *(f"  {name:<{width}}  {suite.summary}" for name, suite in SUITES.items()),
                f"  {'(none)':<{width}}  single forwards in the settings that --setting names",
                f"at the git tag experiments-2026-11, with committed results: {', '.join(ARCHIVED)}",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", nargs="?", choices=tuple(SUITES), metavar="SUITE", help="what to measure: see below")
    add_bench_options(parser)
    return parser


def suite_first(arguments: Sequence[str]) -> list[str]:
    """`arguments` with the older spelling `--suite NAME` as the first, positional argument."""
    found = list(arguments)
    for place, argument in enumerate(found):
        if argument == "--suite" and place + 1 < len(found):
            return [found[place + 1], *found[:place], *found[place + 2 :]]
        if argument.startswith("--suite="):
            return [argument.partition("=")[2], *found[:place], *found[place + 1 :]]
    return found


if __name__ == "__main__":
    sys.exit(main())
