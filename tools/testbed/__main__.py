"""The test bed: a miniature Wan 2.2 with long-range structure.

python -m tools.testbed folders --to /tmp/testbed                     # t2v and i2v of the kept weights, for --model
python -m tools.testbed eval    --model /tmp/testbed/t2v --out FOLDER --quick --setting sparse:fast
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.testbed.drawing import Size
from tools.testbed.evaluate import add_options, evaluate
from tools.testbed.folders import KEPT, write_folders
from wan_core.config.checks import parse_size


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.command == "eval":
        evaluate(options)
        return
    width, height = parse_size(options.size)
    write_folders(options.out, options.to, size=Size(options.frames, height, width), samples=options.samples)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m tools.testbed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    folders = commands.add_parser("folders", help="write the folders for --model")
    folders.add_argument("--size", default="384x256", help="WIDTHxHEIGHT of first frames (default %(default)s)")
    folders.add_argument("--frames", type=int, default=41, help="4n + 1 (default %(default)s)")
    folders.add_argument("--out", type=Path, default=KEPT, help="folder of the weights (default: the kept ones)")
    folders.add_argument("--to", type=Path, required=True, help="folder of t2v and i2v")
    folders.add_argument("--samples", type=int, default=48, help="captions and first frames (default %(default)s)")
    add_options(commands.add_parser("eval", help="what the model makes, and what settings lose"))
    return top


if __name__ == "__main__":
    main()
