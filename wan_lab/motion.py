"""How far the shape of the embedded model's videos moves: with all steps, with four-step LoRAs, and with the guided
first phase of preset `motion`.

    python -m wan_lab.motion --out benchmarks/results --seeds 4

Every preset makes the same captions from the same noise. The amplitude is the way of the shape's centre from frame to
frame, in pixels of a 96-pixel frame; a video in which no shape is seen has none.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline
from wan_lab.metrics import judge, motion_amplitude
from wan_lab.results import envelope, result_path, write_result

CAPTIONS = (
    "a red circle moving right on a blue background",
    "a green square moving up on a white background",
    "a yellow triangle moving left on a purple background",
    "an orange cross moving down on a black background",
)
PRESETS = ("none", "4-step", "motion", "8-step", "8-step-motion")


def row_of(preset: str, seeds: int) -> dict[str, Any]:
    """The videos of one preset."""
    pipe = Pipeline.load(
        LoadOptions(model="tiny", device="cpu"), request=Request(prompt=CAPTIONS[0], preset=preset)
    )  # fmt: skip
    moved, right, forwards = list[float](), 0, 0
    for caption in CAPTIONS:
        for seed in range(seeds):
            video = pipe.generate(Request(prompt=caption, preset=preset, seed=seed))
            frames, forwards = torch.from_numpy(video.frames), video.plan.forwards
            amplitude = motion_amplitude(frames)
            moved += [] if amplitude is None else [amplitude]
            right += judge(frames, caption).all_true
    videos = len(CAPTIONS) * seeds
    error = round(stdev(moved) / len(moved) ** 0.5, 3) if len(moved) > 1 else None
    return {"name": preset, "videos": videos, "seen": len(moved), "amplitude": round(mean(moved), 3), "error": error,
            "right": right, "forwards": forwards}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--out", type=Path, required=True, help="folder or .json file for the result")
    top.add_argument("--seeds", type=int, default=4, help="videos of each caption (default %(default)s)")
    top.add_argument("--presets", default=",".join(PRESETS))
    options = top.parse_args(arguments)
    rows = list[dict[str, Any]]()
    for preset in options.presets.split(","):
        rows.append(row_of(preset, options.seeds))
        print(rows[-1], flush=True)
    result = envelope("motion", torch.device("cpu"), rows, program="wan_lab.motion")
    print(write_result(result, result_path(options.out, "motion", torch.device("cpu"))))


if __name__ == "__main__":
    main()
