"""How often held-out captions come out right: background, colour, shape, motion, all four. Videos are made as `wancore
quality` makes its own (`wan_lab.run`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tools.tiny.clips import Size, held_out_scenes
from tools.tiny.files import part_path, report_sizes
from wan_core.config import LoadOptions, LoraOptions, Request
from wan_core.pipeline.embedded import Scene
from wan_core.pipeline.pipeline import Pipeline
from wan_lab.metrics import Observation, Verdict, describe, psnr, verdict
from wan_lab.results import envelope, result_path, write_result
from wan_lab.run import make
from wan_lab.samples import Sample, as_pixels, batches
from wan_lab.shapes import draw

CLAIMS = ("background", "colour", "shape", "motion", "all")
TASKS = {"t2v-tiny": "text-to-video", "i2v-tiny": "image-to-video"}
SHEET_CLIPS, SHEET_FRAMES = 12, 6


def evaluate(
    folder: Path,
    out: Path,
    *,
    sizes: Sequence[Size],
    device: torch.device,
    samples: int,
    steps: int,
    solver: str,
    guidances: Sequence[float],
    batch: int,
    seed: int,
) -> None:
    """Print a table and write it to `out`, a .json file or a folder for one, with contact sheets beside it, for
    whichever experts `folder` holds."""
    sheets = out.parent if out.suffix == ".json" else out
    rows: list[dict[str, Any]] = []
    details: dict[str, dict[str, Any]] = {}
    print(f"{samples} held-out captions, {steps} steps of {solver}")
    print(" " * 42 + "".join(f"{claim:>12}" for claim in CLAIMS))

    def add(name: str, file: str, made: Made, size: Size, sheet: Tensor) -> None:
        name += "" if size == Size() else f", {size}"
        rows.append({"name": name, "size": str(size), **made.row()})
        print(f"{name:<42}" + "".join(f"{rows[-1][c]:>12.1%}" for c in CLAIMS), flush=True)
        pixels = contact_sheet(sheet[:SHEET_CLIPS]).numpy()
        Image.fromarray(pixels).save(sheets / f"{file.format(f'{size.width}x{size.height}')}.png")

    for task, label in TASKS.items():
        if not part_path(folder, f"{task[:3]}_high").is_file():
            continue
        pipe = load(folder, task, device)
        for size, guidance in product(sizes, guidances):
            request = request_of(size, steps=steps, solver=solver, guidance_high=guidance, guidance_low=guidance)
            made = make_all(pipe, request, samples, batch, seed)
            file = f"{task[:3]}_{{}}_guidance{guidance:g}"
            add(f"{label}, guidance {guidance:g}", file, made, size, made.videos)
            details[rows[-1]["name"]] = made.detail() | (first_frames(made, size) if task == "i2v-tiny" else {})
    more = {"steps": steps, "solver": solver, "seed": seed, "details": details}
    result = envelope("embedded", device, rows, program="tools.train_tiny") | more
    print(write_result(result, result_path(out, result["suite"], device)))
    report_sizes(folder)


def load(folder: Path, task: str, device: torch.device, loras: tuple[LoraOptions, ...] = ()) -> Pipeline:
    """The parts that training left in `folder`, in float32."""
    files = {name: str(part_path(folder, name)) for name in ("vae", "text_encoder")}
    files |= {expert: str(part_path(folder, f"{task[:3]}_{expert}")) for expert in ("high", "low")}
    precise = {"precision": "fp32", "vae_precision": "fp32"}
    return Pipeline.load(LoadOptions(task=task, device=str(device), loras=loras, **files, **precise))


def request_of(size: Size, **settings: Any) -> Request:
    sides = {"width": size.width, "height": size.height, "frames": size.frames}
    return Request(prompt="", negative_prompt="", preset="none", **sides, **settings)


@dataclass
class Made:
    """Videos of held-out captions, uint8 [B, F, H, W, 3], and what they show. seconds: of denoising and decoding."""

    videos: Tensor
    seconds: float
    forwards: int  # of a video
    samples: list[Sample]
    scenes: list[Scene]
    seen: list[Observation] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """How many of the claims are true, and how many videos are right in all of them (`all`)."""
        count = len(self.samples)
        claims = {
            claim: [getattr(v, "all_true" if claim == "all" else claim) for v in self.verdicts] for claim in CLAIMS
        }
        shares = {claim: round(sum(values) / count, 4) for claim, values in claims.items()}
        return {"samples": count, **shares, "seconds": round(self.seconds / count, 4)}

    def detail(self) -> dict[str, Any]:
        """The share of right shapes for each shape and of right motions for each motion, and the mean overlap with the
        best template for each shape: how well it is drawn."""
        rights = {claim: [float(getattr(v, claim)) for v in self.verdicts] for claim in ("shape", "motion")}
        detail = {claim: self.by_word(claim, values, 2) for claim, values in rights.items()}
        return detail | {"overlap": self.by_word("shape", [one.overlap for one in self.seen], 4)}

    def by_word(self, claim: str, values: Sequence[float], digits: int) -> dict[str, float]:
        words: dict[str, list[float]] = {}
        for value, scene in zip(values, self.scenes, strict=True):
            words.setdefault(getattr(scene, claim), []).append(value)
        return {word: round(sum(each) / len(each), digits) for word, each in words.items()}


def make_all(pipe: Pipeline, base: Request, count: int, batch: int, seed: int) -> Made:
    """Videos of held-out captions."""
    scenes = held_out_scenes(count)
    samples = [Sample(scene.caption, seed + n) for n, scene in enumerate(scenes)]
    runs, seconds = [], 0.0
    for part in batches(pipe, base, samples, batch):
        begin = time.monotonic()
        runs.append(make(pipe, part, part.job.plan))
        seconds += time.monotonic() - begin
    made = Made(torch.cat([run.frames for run in runs]), seconds, runs[0].forwards, samples, scenes)
    made.seen = [describe(video.to(pipe.models.device)) for video in made.videos]
    made.verdicts = [verdict(seen, scene) for seen, scene in zip(made.seen, scenes, strict=True)]
    return made


def first_frames(made: Made, size: Size) -> dict[str, float]:
    """How close the first frames are to those that were given."""
    sides = {"width": size.width, "height": size.height}
    given = [draw([s], seed=one.seed, **sides)[0, :, :1] for s, one in zip(made.scenes, made.samples, strict=True)]
    pixels = [torch.from_numpy(as_pixels(frame.transpose(0, 1))) for frame in given]
    distances = [psnr(video[:1], first) for video, first in zip(made.videos, pixels, strict=True)]
    return {"first_frame_psnr": round(sum(distances) / len(distances), 2)}


def contact_sheet(videos: Tensor) -> Tensor:
    """uint8 [rows, columns, 3] of videos uint8 [B, F, H, W, 3]: one video a row, frames from first to last, a grey line
    between."""
    chosen = torch.linspace(0, videos.shape[1] - 1, min(SHEET_FRAMES, videos.shape[1])).round().long()
    frames = torch.nn.functional.pad(videos[:, chosen], (0, 0, 0, 2, 0, 2), value=128)  # [B, f, H + 2, W + 2, 3]
    return frames.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
