"""What the benchmark measures, by name, and its command-line options. Knows no torch: `--help` is quick."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """A fixed list of things to measure. `sizes` are WIDTHxHEIGHTxFRAMES on a GPU; on a CPU there is one small size."""

    summary: str
    sizes: tuple[str, ...]
    settings: tuple[str, ...] = ()  # where none is named
    takes: tuple[str, ...] = ()  # options that mean something here, beyond those that every suite takes
    fewest_runs: int = 1


CPU_SIZE = "96x96x17"
SUITES: dict[str, Suite] = {
    "single": Suite(
        "the ladder: peers and ours, one technique a row",
        ("832x480x81", "1280x720x81"),
        takes=("setup", "layers", "precision", "runs"),
    ),
    "attention": Suite(
        "every dense attention kernel on one layer: time, and error on several kinds of data",
        ("1280x720x81", "832x480x81"),
        takes=("runs",),
    ),
    "everyday": Suite(
        "ComfyUI's own image-to-video template in a real server, with its nodes and with ours",
        ("640x640x81",),
        takes=("setting", "setup", "layers", "runs", "steps", "gpus", "scratch", "checkout"),
    ),
    "templates": Suite(
        "ComfyUI's official templates of Animate-2, S2V, VACE and Fun in a real server, samplers alone",
        ("1280x720x81",),
        takes=("setting", "setup", "layers", "scratch", "checkout"),
    ),
    "videos": Suite(
        "whole videos of the command line, from the start of the process to the file, and kept",
        ("1280x720x81",),
        takes=("setting", "runs", "steps", "gpus", "scratch"),
        fewest_runs=0,
    ),
    "small": Suite(
        "whole videos on smaller cards with less host memory",
        ("640x640x81",),
        takes=("setting", "runs", "scratch"),
    ),
    "tests": Suite("the project's tests on this machine", ("all",), ("gpu tests",), takes=("setting",)),
}
# Suites that answered their question: their code is at the tag experiments-2026-11, their results are committed.
ARCHIVED = ("caches", "contributions", "forward", "four-step", "generate", "gguf", "guidance", "int8", "rotation")
ARCHIVED += ("native", "parallel", "profile", "small-cards", "sparse", "startup", "streaming", "switch", "trajectory")
EVERYDAY_PARTS = ("on", "fresh", "off", "cold")
TEMPLATE_PARTS = {  # a setting of templates -> its template
    "animate2": "video_wan_animate2",
    "s2v": "video_wan2_2_14B_s2v",
    "vace": "video_wan_vace_14B_v2v",
    "fun": "video_wan2_2_14B_fun_control",
}


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="random:TASK, tiny, or a transformer file (default: random:t2v-A14B on a GPU, tiny on a CPU)"
    )
    parser.add_argument("--size", action="append", help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, repeatable")
    parser.add_argument("--setting", action="append", help="a part of a suite, or what its rows are; repeatable")
    parser.add_argument(
        "--setup",
        action="append",
        help="a row of the ladder by name, a peer, or PRECISION/ATTENTION with /torch (no fused kernels) or /compile "
        "after it; repeatable (default: all rows of the suite)",
    )
    parser.add_argument("--layers", type=int, help="only this many blocks (to measure on less memory, or sooner)")
    parser.add_argument("--runs", type=int, help="timed runs after one that is not counted (default 3)")
    parser.add_argument("--gpus", type=int, help="of the suites everyday and videos (default: all there are)")
    parser.add_argument("--steps", type=int, help="steps of a generation, in suites that make one")
    parser.add_argument(
        "--scratch",
        type=Path,
        help="folder for files that a suite writes and removes again (default: the system's)",
    )
    parser.add_argument(
        "--checkout",
        type=Path,
        help="folder of the checkout of ComfyUI (suites everyday, templates)",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"), help="of what is not quantised")
    parser.add_argument("--out", type=Path, help="JSON file, or a folder for one named after suite, device and day")
    parser.add_argument("--overwrite", action="store_true", help="replace that file if it exists")
