"""`python -m benchmarks SUITE`: measure on this machine, print a table, write JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.options import ARCHIVED, SUITES, add_options
from wan_core.cli import report_faults

PROGRAM = "python -m benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite. Returns the exit code: 0 done, 1 a row failed, 2 a user error, 3 out of memory, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["ladder"]:
        from benchmarks.ladder import main as run_ladder

        return run_ladder(words[1:])
    if words[:1] == ["pack"]:
        from benchmarks.pack import main as run_pack

        return report_faults(PROGRAM, lambda: run_pack(words[1:]))
    options = build_parser().parse_args(words)

    def run() -> int:
        from benchmarks.run import run_bench  # imports torch: not for `--help`

        return run_bench(options)

    return report_faults(PROGRAM, run)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s SUITE [options]",
        description="Measure the engine and its peers on this machine.",
        epilog="ladder runs all of it in order of value, as far as the time goes; pack makes what a machine without "
        "a package registry needs for it: both have a --help of their own. At commit 2cb3e794, with "
        f"committed results: {', '.join(ARCHIVED)}.",
    )
    suites = parser.add_subparsers(dest="suite", metavar="SUITE", required=True)
    for name, suite in SUITES.items():
        add_options(suites.add_parser(name, prog=f"{PROGRAM} {name}", help=suite.summary), suite)
    return parser


if __name__ == "__main__":
    sys.exit(main())
