"""What the test bed makes, and what settings lose on it against the full run, worst clips shown.

Frames are uint8 [F, H, W, 3] on the CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tools.testbed.folders import SAMPLES
from tools.testbed.scenes import parse_world, shows_colours
from wan_core.config import LoadOptions, Request, SkipOptions
from wan_core.config.checks import parse_size
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import parse_setting
from wan_lab.compare import Comparison, compare, find_perceptual, standard_error, summary
from wan_lab.metrics import psnr
from wan_lab.results import envelope, result_path, write_result
from wan_lab.run import FULL, Run, make, plain, skipping, warm_up
from wan_lab.samples import Batch, batches, read_samples

SHEET_CLIPS, SHEET_FRAMES = 8, 6
LOADED = ("precision", "attention")  # kinds of settings that are options of loading


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="the folder t2v or i2v that `folders` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result and of pictures")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        help="repeatable: as of `wancore quality`, or how the model is loaded, precision:fp8 or attention:NAME; "
        "several joined by +",
    )
    parser.add_argument("--count", type=int, default=24, help="videos (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, help="default: the task's")
    parser.add_argument("--guidance", type=float, help="for both experts (default: the task's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", default="384x256")
    parser.add_argument("--frames", type=int, default=41)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32", help="of the full run (default %(default)s)")
    parser.add_argument("--attention", default="auto", help="of the full run")


@dataclass
class Made:
    """The videos of a setting, in the order of the samples. pipe: the model as it is loaded for them."""

    pipe: Pipeline
    skip: SkipOptions | None
    runs: list[Run] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    colours: list[bool] = field(default_factory=list)
    worst: tuple[float, Tensor] | None = None  # its PSNR, frames of the full run and its own, one above the other


@torch.no_grad()
def evaluate(options: argparse.Namespace) -> None:
    """Print a table, write the result and pictures: videos of the full run, and of each setting the worst beside it."""
    options.out.mkdir(parents=True, exist_ok=True)
    width, height = parse_size(options.size)
    full = load(options, {})
    guidance = {"guidance_high": options.guidance, "guidance_low": options.guidance}
    base = Request(
        prompt="",
        negative_prompt="",
        width=width,
        height=height,
        frames=options.frames,
        steps=options.steps,
        **guidance,
    )
    samples = read_samples(options.model / SAMPLES, options.count, options.seed)
    found = {FULL: Made(full, None), **{name: open_setting(options, name, full) for name in options.setting}}
    first: list[float] = []
    sheet: list[Tensor] = []
    for batch in batches(full, base, samples, options.batch):
        videos = measure(batch, found)
        sheet += [pick(frames) for frames in videos[: SHEET_CLIPS - len(sheet)]]
        pairs = zip(videos, batch.samples, strict=True)
        first += [psnr(frames[:1], picture(sample.image)[None]) for frames, sample in pairs if sample.image]
        print(f"{len(found[FULL].colours)} of {len(samples)} videos", flush=True)
    name = options.model.name
    rows = [row(setting, made, found[FULL], options.size) for setting, made in found.items()]
    for line in rows:
        print("  ".join(f"{key} {value}" for key, value in line.items()))
    save(torch.cat(sheet), options.out / f"testbed_{name}.png")
    worst = [made.worst[1] for made in found.values() if made.worst is not None]
    if worst:
        save(torch.cat(worst), options.out / f"testbed_{name}_worst.png")
    device = full.models.device
    result = envelope(f"testbed-{name}", device, rows, program="tools.testbed")
    result |= {"first_frame_psnr": round(fmean(first), 2)} if first else {}
    print(write_result(result, result_path(options.out, result["suite"], device)))


def load(options: argparse.Namespace, changes: dict[str, str]) -> Pipeline:
    """The model as the command line says, but for `changes`. Its VAE is the same in all: it is not what is compared."""
    said = {"precision": options.precision, "attention": options.attention, **changes}
    return Pipeline.load(LoadOptions(model=str(options.model), device=options.device, vae_precision="fp32", **said))


def open_setting(options: argparse.Namespace, setting: str, full: Pipeline) -> Made:
    """Raises OptionError for a setting that is none."""
    parts = [part.split(":", 1) for part in setting.split("+")]
    changes = {part[0]: part[-1] for part in parts if part[0] in LOADED}
    rest = "+".join(":".join(part) for part in parts if part[0] not in LOADED)
    return Made(load(options, changes) if changes else full, parse_setting(rest) if rest else None)


def measure(batch: Batch, found: dict[str, Made]) -> Tensor:
    """Make a batch in full and in each setting, and add it to `found`. Returns the full run's frames
    [B, F, H, W, 3]."""
    plan = plain(batch.job.plan)
    perceptual = find_perceptual()[1]
    full: Tensor | None = None
    for setting, made in found.items():
        pipe, device = made.pipe, made.pipe.models.device
        if not made.runs and (setting == FULL or pipe is not found[FULL].pipe):
            warm_up(pipe, batch, plan, alone=False)
        run = make(pipe, batch, skipping(pipe, batch, plan, made.skip))
        made.runs.append(run)
        full = run.frames if full is None else full
        for frames, exact, sample in zip(run.frames, full, batch.samples, strict=True):
            made.colours.append(shows_colours(frames.to(device), parse_world(sample.caption)))
            if setting == FULL:
                continue
            made.comparisons.append(compare(frames, exact, sample.caption, perceptual, device=device))
            value = made.comparisons[-1].psnr
            if made.worst is None or value < made.worst[0]:
                made.worst = value, torch.cat([pick(exact), pick(frames)])
    assert full is not None
    return full


def row(setting: str, made: Made, full: Made, size: str) -> dict[str, Any]:
    """A row of the result; `se`: standard errors of the means."""
    count = len(made.colours)
    forwards, all_forwards = (sum(run.forwards * len(run.frames) for run in m.runs) for m in (made, full))
    colours = fmean(map(float, made.colours))
    found: dict[str, Any] = {"name": setting, "size": size, "samples": count}
    if made.comparisons:
        found |= {"saved": round(1 - forwards / all_forwards, 4), **summary(made.comparisons)}
    found |= {"colours": round(colours, 4), "colours_se": round(standard_error(made.colours), 4)}
    seconds, base = (sum(run.seconds for run in m.runs) for m in (made, full))
    return {**found, "seconds": round(seconds / count, 4), "ratio": round(base / seconds, 3), "ratio_to": FULL}


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
