"""What the test bed makes, and what settings lose on it against the full run: as `wancore quality` measures it, with
settings of loading too, a judge for its own captions, and the worst clips shown.

Frames are uint8 [F, H, W, 3] on the CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tools.testbed.folders import SAMPLES
from tools.testbed.full_runs import FullRuns, digest
from tools.testbed.scenes import parse_world, shows_colours
from wan_core.config import LoadOptions, Request
from wan_core.config.checks import parse_size
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import parse_setting
from wan_lab.compare import Comparison
from wan_lab.metrics import psnr
from wan_lab.results import envelope, result_path, write_result
from wan_lab.run import FULL, Measured, measure_quality
from wan_lab.samples import Batch, read_samples

SHEET_CLIPS, SHEET_FRAMES = 8, 6
QUICK = 6  # clips
FULL_RUNS = "full-runs"
LOADED = ("precision", "attention", "model")  # kinds of settings that are options of loading


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="the folder t2v or i2v that `folders` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result and of pictures")
    help_text = "repeatable: as of `wancore quality`, or how the model is loaded, precision:fp8, attention:NAME or"
    parser.add_argument("--setting", action="append", default=[], help=f"{help_text} model:FOLDER; several joined by +")
    quick = f"for a CPU of two cores: {QUICK} videos one at a time, full runs kept in --keep"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--count", type=int, help=f"videos (default: 24, {QUICK} with --quick)")
    parser.add_argument("--batch", type=int, help="made at once (default: 8, 1 with --quick)")
    keep = f"folder of full runs, made once and read the next time (default with --quick: MODEL/{FULL_RUNS})"
    parser.add_argument("--keep", type=Path, help=keep)
    parser.add_argument("--steps", type=int, help="default: the task's")
    parser.add_argument("--guidance", type=float, help="for both experts (default: the task's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", default="384x256")
    parser.add_argument("--frames", type=int, default=41)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32", help="of the full run (default %(default)s)")
    parser.add_argument("--attention", default="auto", help="of the full run")


def evaluate(options: argparse.Namespace) -> None:
    """Print a table, write the result and pictures: videos of the full run, and of each setting the worst beside it."""
    began = time.process_time()
    options.out.mkdir(parents=True, exist_ok=True)
    count, size = options.count or (QUICK if options.quick else 24), options.batch or (1 if options.quick else 8)
    width, height = parse_size(options.size)
    sides = {"width": width, "height": height, "frames": options.frames, "steps": options.steps}
    guidance = {"guidance_high": options.guidance, "guidance_low": options.guidance}
    base = Request(prompt="", negative_prompt="", **sides, **guidance)
    samples = read_samples(options.model / SAMPLES, count, options.seed)
    full, pipes, settings = load(options, {}), {}, {FULL: None}
    for setting in options.setting:
        parts = [part.split(":", 1) for part in setting.split("+")]
        changes = {part[0]: part[-1] for part in parts if part[0] in LOADED}
        skipped = "+".join(":".join(part) for part in parts if part[0] not in LOADED)
        settings[setting] = parse_setting(skipped) if skipped else None
        if changes:
            pipes[setting] = load(options, changes)
    first: list[float] = []
    sheet: list[Tensor] = []
    worst: dict[str, tuple[float, Tensor]] = {}

    def look(batch: Batch, videos: Mapping[str, Tensor]) -> None:
        exact = videos[FULL]
        sheet.extend(pick(frames) for frames in exact[: SHEET_CLIPS - len(sheet)])
        pairs = zip(exact, batch.samples, strict=True)
        given = [(frames[:1], picture(sample.image)[None]) for frames, sample in pairs if sample.image]
        first.extend(psnr(made, image) for made, image in given if made.shape == image.shape)  # images have one size
        for setting in options.setting:
            for frames, whole in zip(videos[setting], exact, strict=True):
                value = psnr(frames, whole)
                if setting not in worst or value < worst[setting][0]:
                    worst[setting] = value, torch.cat([pick(whole), pick(frames)])

    device = full.models.device

    def judged(frames: Tensor, caption: str) -> bool:
        return shows_colours(frames.to(device), parse_world(caption))

    keep = options.keep or (options.model / FULL_RUNS if options.quick else None)
    about = {**sides, **guidance, "precision": options.precision, "attention": options.attention}
    run = None if keep is None else FullRuns(keep, {**about, "weights": digest(options.model)}).run
    hooks = {"judged": judged, "full_run": run, "on_batch": look}
    measured = measure_quality(full, base, samples, settings, size, pipes=pipes, **hooks)
    name, rows = options.model.name, rows_of(measured)
    for line in rows:
        print("  ".join(f"{key} {value}" for key, value in line.items()))
    save(torch.cat(sheet), options.out / f"testbed_{name}.png")
    if worst:
        save(torch.cat([pixels for _, pixels in worst.values()]), options.out / f"testbed_{name}_worst.png")
    result = envelope(f"testbed-{name}", device, rows, program="tools.testbed")
    result |= {"first_frame_psnr": round(fmean(first), 2)} if first else {}
    result["clips"] = {name: [clip_words(clip) for clip in clips] for name, clips in measured.comparisons.items()}
    result["cpu_seconds"] = round(time.process_time() - began)
    print(write_result(result, result_path(options.out, result["suite"], device)))


def load(options: argparse.Namespace, changes: dict[str, str]) -> Pipeline:
    """The model as the command line says, but for `changes`. Its VAE is the same in all: it is not what is compared."""
    said = {"model": str(options.model), "precision": options.precision, "attention": options.attention, **changes}
    return Pipeline.load(LoadOptions(device=options.device, vae_precision="fp32", **said))


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    """The rows of the result; `colours`: the share of videos that show those of their caption and no others."""
    names = {"truth": "colours", "truth_se": "colours_se"}
    left_out = {"forwards", "front"}
    rows = [{names.get(key, key): row[key] for key in row if key not in left_out} for row in measured.rows()]
    compared = {"saved", "psnr", "psnr_worst", "psnr_se", "ssim", "ssim_se", "perceptual", "flicker"}
    return [{key: value for key, value in rows[0].items() if key not in compared}, *rows[1:]]


def clip_words(clip: Comparison) -> str:
    """PSNR of one clip, and whether it shows its colours: `23.41 right`."""
    return f"{clip.psnr:.2f} {'right' if clip.truth else 'wrong'}"


def pick(frames: Tensor) -> Tensor:
    """A few frames side by side, [H, f * W, 3]."""
    chosen = torch.linspace(0, len(frames) - 1, SHEET_FRAMES).round().long()
    return torch.cat(list(frames[chosen]), 1)


def picture(path: str) -> Tensor:
    """uint8 [H, W, 3]."""
    with Image.open(path) as image:
        return torch.tensor(list(image.convert("RGB").tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


def save(pixels: Tensor, path: Path) -> None:
    """Half the size: they are looked at."""
    image = Image.fromarray(pixels.numpy())
    image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX).save(path)
    print(path, flush=True)
