"""What the benchmark measures, by name, and its command-line options. Knows no torch: `--help` is quick."""

from __future__ import annotations

import argparse
from pathlib import Path

from wan_core.cache.arguments import add_skip_options

# suite -> (sizes as WIDTHxHEIGHTxFRAMES, settings, what ratios refer to)
SUITES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "forward": (("832x480x81", "1280x720x81"), ("diffusers", "forward"), "diffusers"),
    "guidance": (
        ("208x112x17", "416x240x17", "416x240x81", "832x480x33", "832x480x81"),
        ("sequential", "batched"),
        "sequential",
    ),
    # a whole video with random weights at full size, by phase
    "generate": (("832x480x81",), (), ""),
}
SETTINGS = {
    "forward": "one forward of one branch",
    "sequential": "both guidance branches, one forward each",
    "batched": "both guidance branches in one forward",
    "diffusers": "diffusers' WanTransformer3DModel, eager, on the same weights",
    "attention:NAME": "one forward with that attention backend",
}


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite", choices=tuple(SUITES), help="a fixed list of sizes and settings, as in the README's tables"
    )
    parser.add_argument(
        "--model", help="random:TASK, tiny, or a transformer file (default: random:t2v-A14B on a GPU, tiny on a CPU)"
    )
    parser.add_argument("--size", action="append", help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, repeatable")
    parser.add_argument(
        "--setting", action="append", help="repeatable: " + "; ".join(f"{k}: {v}" for k, v in SETTINGS.items())
    )
    parser.add_argument("--layers", type=int, help="only this many blocks (to measure on less memory)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs after one warm-up (default %(default)s)")
    parser.add_argument("--steps", type=int, help="steps of the suite `generate` (default: the task's own)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    add_skip_options(parser)
    parser.add_argument("--out", type=Path, help="JSON file, or a folder for one named after suite, device and day")
