"""What the benchmark measures, by name, and its command-line options. Knows no torch: `--help` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan_core.config import OptionError


@dataclass(frozen=True)
class Suite:
    """A fixed list of things to measure. `sizes` are WIDTHxHEIGHTxFRAMES on a GPU; on a CPU there is one small size."""

    summary: str
    sizes: tuple[str, ...]
    takes: tuple[str, ...] = ()  # options that mean something here, beyond those that every suite takes
    parts: tuple[str, ...] = ()  # what `--setting` names, where these are parts of the suite
    fewest_runs: int = 1


CPU_SIZE = "96x96x17"
EVERYDAY_PARTS = {  # a setting of everyday -> what its rows begin with
    "on": "on, new seed",
    "fresh": "on, new prompt and picture",
    "t2v": "text to video, on, new seed",
    "off": "off",
    "cold": "cold",
}
TEMPLATE_PARTS = {  # a setting of templates -> its template
    "animate2": "video_wan_animate2",
    "s2v": "video_wan2_2_14B_s2v",
    "vace": "video_wan_vace_14B_v2v",
    "fun": "video_wan2_2_14B_fun_control",
}
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
        takes=("setting", "setup", "layers", "wide", "runs", "steps", "gpus", "scratch"),
        parts=tuple(EVERYDAY_PARTS),
    ),
    "templates": Suite(
        "ComfyUI's official templates of Animate-2, S2V, VACE and Fun in a real server, samplers alone",
        ("1280x720x81",),
        takes=("setting", "setup", "layers", "scratch"),
        parts=tuple(TEMPLATE_PARTS),
    ),
    "videos": Suite(
        "whole videos of the command line, from the start of the process to the file, and kept",
        ("1280x720x81",),
        takes=("setting", "runs", "gpus", "scratch"),
        fewest_runs=0,
    ),
    "small": Suite(
        "whole videos on smaller cards with less host memory",
        ("640x640x81",),
        takes=("setting", "runs", "scratch"),
    ),
    "tests": Suite("the project's tests on this machine", ("all",), takes=("setting",)),
}
# Suites that answered their question: their code is at commit 2cb3e794, their results are committed.
ARCHIVED = ("caches", "contributions", "forward", "four-step", "generate", "gguf", "guidance", "int8", "rotation")
ARCHIVED += ("native", "parallel", "profile", "small-cards", "sparse", "startup", "streaming", "switch", "trajectory")


def check_names(kind: str, given: Collection[str], known: Collection[str], suite: str) -> None:
    """Raise OptionError for a name that the suite does not have. kind: the option, in words."""
    if unknown := set(given) - set(known):
        raise OptionError(f"{kind} {min(unknown)!r} given; the suite {suite} has {', '.join(known)}")


def add_options(parser: argparse.ArgumentParser, suite: Suite) -> None:
    for name in (*OF_EVERY_SUITE, *suite.takes):
        parser.add_argument(f"--{name}", **OPTIONS[name])


OF_EVERY_SUITE = ("model", "size", "device", "out", "overwrite")
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"help": "random:TASK, tiny, or a transformer file (default: random:t2v-A14B on a GPU, tiny on a CPU)"},
    "size": {"action": "append", "help": "WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, repeatable"},
    "device": {"default": "auto"},
    "out": {"type": Path, "help": "JSON file, or a folder for one named after suite, device and day"},
    "overwrite": {"action": "store_true", "help": "replace that file if it exists"},
    "setting": {"action": "append", "help": "a part of the suite, or what its rows are; repeatable"},
    "setup": {
        "action": "append",
        "help": "a row by name; in the suite single also PRECISION/ATTENTION, with /torch (no fused kernels) or "
        "/compile after it; repeatable (default: all rows)",
    },
    "layers": {"type": int, "help": "only this many blocks (to measure on less memory, or sooner)"},
    "wide": {"action": "store_true", "help": "FP8 files that ask for products in 16 bits, as some published ones do"},
    "runs": {"type": int, "help": "timed runs after one that is not counted (default 3)"},
    "gpus": {"type": int, "help": "how many GPUs (default 1)"},
    "steps": {"type": int, "help": "steps of the part `off` (default 20)"},
    "scratch": {"type": Path, "help": "folder for what the suite writes (default: the system's)"},
    "precision": {"default": "bf16", "choices": ("bf16", "fp32"), "help": "of what is not quantised"},
}
