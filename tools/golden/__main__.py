"""`python -m tools.golden`: see the package's docstring."""

from __future__ import annotations

import os
import sys

from tools.golden import __doc__ as about
from tools.golden.environment import prepare

prepare()  # before torch is imported
# ruff: noqa: E402
import argparse
import tempfile
from pathlib import Path

from tools.golden.compare import compare, read
from tools.golden.doors import table
from tools.golden.record import record


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.golden", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    adding = {
        "record": "run all cases and write what they give",
        "compare": "list what differs between two recordings; exit code 1 if anything does",
        "doors": "list where the doors of a recording disagree",
    }
    for name, help in adding.items():
        command = commands.add_parser(name, help=help)
        command.add_argument("folder", type=Path, help="folder of the recording")
        if name == "compare":
            command.add_argument("other", type=Path, nargs="?", help="another; default: record this checkout")
        command.add_argument(
            "--only", default="*", metavar="PATTERN", help="cases by name, with * and ? (default: all)"
        )
        if name != "doors":
            command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="command lines at the same time")
    options = parser.parse_args()
    if options.command == "record":
        return record(options.folder.resolve(), options.only, options.jobs)
    if options.command == "doors":
        print(table(read(options.folder, options.only)))
        return 0
    if options.other is not None:
        return compare(options.folder, options.other, options.only)
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        record(Path(name), options.only, options.jobs)
        return compare(options.folder, Path(name), options.only)


if __name__ == "__main__":
    sys.exit(main())
