"""The table `waterfall`: what a video on four GPUs is expected to take, from parts that were measured apart.

Nobody has measured the whole. Each part is a row of a committed result, or one of READ, which were read once and are in
no result. Parts that run beside each other count once: kernels are prepared while weights are read and the prompt is
encoded, and frames are encoded to H.264 while later ones are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]
SIZE = "1280x720x81"
VIDEOS, PHASES = "sparse-videos-h200", ("denoise high", "denoise low")
ULYSSES_SPARSE = 1.8  # (read) sparse forwards on the two GPUs of a branch, over one
READ = {
    "load": 1.63,  # both experts in FP8 from the page cache, by four ranks
    "text": 1.8,  # of a first prompt, the text encoder's first forward with it
    "first use": 6.0,  # of kernels, where their files are kept; 18 s where nothing is
    "after": 0.5,  # encoding that is left after the last frame: 4 to 7 CPU seconds by 16 cores
}
GOALS = {"four steps, an eighth of the blocks": 6}


@dataclass(frozen=True)
class Run:
    """name: as shown. setting: its rows on one GPU. share: how many times as fast four GPUs denoise."""

    name: str
    setting: str
    share: float


def waterfall_table(newest: Callable[[str], Result], cell: Callable[[object], str]) -> str:
    """KeyError for a row that the newest result lacks."""
    dense = row(newest("parallel-h200"), "fp8 + cudnn-fp8, ulysses 4")["ratio"]
    decode = row(newest("parallel-decode-h200"), "decode, strips 4")["seconds"]
    start = started(newest("startup-h200"))
    runs = (
        Run("four steps, an eighth of the blocks", "sparse:0.875/0@4", ULYSSES_SPARSE**2),
        Run("four steps, all blocks", "full@4", dense),
    )
    heads = ("", "denoising, one GPU", "times as fast", "denoising", "decoding", "kept", "goal", "cold")
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    wait = max(READ["first use"], READ["load"] + READ["text"])  # beside each other
    for run in runs:
        one = sum(row(newest(VIDEOS), f"{run.setting}, fp8 + cudnn-fp8: {phase}")["seconds"] for phase in PHASES)
        after_load = one / run.share + decode + READ["after"]
        numbers = [
            one,
            run.share,
            one / run.share,
            decode,
            after_load,
            GOALS.get(run.name, ""),
            start + wait + after_load,
        ]
        lines.append("| " + " | ".join([run.name, *(cell(number) for number in numbers)]) + " |")
    return "\n".join([*lines, ""])


def started(result: Result) -> float:
    """Seconds until a cold process and then its ranks are imported, one after the other, where bytecode is kept."""
    phases: Mapping[str, float] = row(result, "cold process, bytecode kept")["phases"]
    here = sum(phases[name] for name in ("start Python", "import torch", "import wan_core", "headers, Triton"))
    return 2 * here + phases["CUDA context"] + phases["attention's library"]


def row(result: Result, name: str) -> Result:
    for one in result["rows"]:
        if one["name"] == name and one.get("size") in (SIZE, "", None):
            return one
    raise KeyError(name)
