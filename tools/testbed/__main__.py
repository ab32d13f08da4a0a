"""The folders of the test bed, a miniature Wan 2.2 with long-range structure, for --model.

python -m tools.testbed --to /tmp/testbed            # t2v and i2v of the kept weights
python -m tools.judges --judge "test bed, text, whole size" --testbed /tmp/testbed --out FOLDER --count 6 --batch 1
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.testbed.drawing import Size
from tools.testbed.folders import KEPT, write_folders
from wan_core.config.checks import parse_size


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    width, height = parse_size(options.size)
    write_folders(options.out, options.to, size=Size(options.frames, height, width), samples=options.samples)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tools.testbed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--size", default="384x256", help="WIDTHxHEIGHT of first frames (default %(default)s)")
    made.add_argument("--frames", type=int, default=41, help="4n + 1 (default %(default)s)")
    made.add_argument("--out", type=Path, default=KEPT, help="folder of the weights (default: the kept ones)")
    made.add_argument("--to", type=Path, required=True, help="folder of t2v and i2v")
    made.add_argument("--samples", type=int, default=48, help="captions and first frames (default %(default)s)")
    return made


if __name__ == "__main__":
    main()
