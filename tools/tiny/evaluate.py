"""How often held-out captions come out right: background, colour, shape, motion, all four.

Shapes: B batch, z latent channels, F/H/W video frames, rows, columns, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.tiny.clips import Size, encode, held_out_scenes, image_rows
from tools.tiny.experts import BOUNDARY
from tools.tiny.files import part_path, report_sizes
from tools.tiny.png import write_png
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae
from wan_core.metrics import Verdict, judge, psnr
from wan_core.model import WanModel
from wan_core.schedules import euler_schedule
from wan_core.shapes import Scene, draw
from wan_core.text.umt5 import TextEncoder
from wan_core.vae import VideoVAE

CLAIMS = ("background", "colour", "shape", "motion", "all_true")
SHEET_CLIPS, SHEET_FRAMES = 12, 6


@dataclass(frozen=True, kw_only=True)
class Sampling:
    steps: int
    shift: float
    boundary: float
    guidance: float
    batch: int
    seed: int


@torch.inference_mode()
def evaluate(
    folder: Path,
    out: Path,
    *,
    size: Size,
    device: torch.device,
    samples: int,
    steps: int,
    shift: float,
    guidances: Sequence[float],
    batch: int,
    seed: int,
) -> None:
    """Print a table and write eval.json and contact sheets for whichever experts `folder` holds."""
    vae = load_vae(part_path(folder, "vae"), device=device, dtype=torch.float32)
    text = load_text_encoder(part_path(folder, "text_encoder"), device=device, dtype=torch.float32)
    scenes = held_out_scenes(samples)
    truth = draw(scenes, seed=seed, frames=size.frames, height=size.height, width=size.width).to(device)
    rows: list[dict[str, object]] = []
    print(f"{samples} held-out captions, {steps} Euler steps, shift {shift:g}")
    print(" " * 16 + "".join(f"{claim:>12}" for claim in CLAIMS))
    for task in ("t2v", "i2v"):
        paths = {name: part_path(folder, f"{task}_{name}") for name in ("high", "low")}
        if not all(path.is_file() for path in paths.values()):
            continue
        experts = {name: load_dit(path, device=device, dtype=torch.float32) for name, path in paths.items()}
        for guidance in guidances:
            begin = time.monotonic()
            run = Sampling(steps=steps, shift=shift, boundary=BOUNDARY[task], guidance=guidance, batch=batch, seed=seed)
            videos = generate(experts, vae, text, scenes, truth, run)
            verdicts = [judge(video, scene) for video, scene in zip(videos, scenes, strict=True)]
            row: dict[str, object] = {"task": task, "guidance": guidance, **tally(verdicts, scenes)}
            row["seconds"] = round(time.monotonic() - begin, 1)
            if task == "i2v":
                first = truth[:, :, :1].permute(0, 2, 3, 4, 1) / 2 + 0.5
                distances = [psnr(video[:1], given) for video, given in zip(videos, first, strict=True)]
                row["first_frame_psnr"] = round(sum(distances) / samples, 2)
            rows.append(row)
            shares = "".join(f"{row[claim]:>11.1%} " for claim in CLAIMS)
            details = {key: value for key, value in row.items() if key not in ("task", "guidance", *CLAIMS)}
            print(f"{task} guidance {guidance:<3g}{shares}  {details}", flush=True)
            write_png(out / f"{task}_guidance{guidance:g}.png", contact_sheet(videos[:SHEET_CLIPS]))
    result = {"samples": samples, "steps": steps, "shift": shift, "seed": seed, "device": str(device), "rows": rows}
    (out / "eval.json").write_text(json.dumps(result, indent=1) + "\n")
    report_sizes(folder)


def generate(
    experts: dict[str, WanModel],
    vae: VideoVAE,
    text: TextEncoder,
    scenes: Sequence[Scene],
    truth: Tensor,
    run: Sampling,
) -> Tensor:
    """Videos [B, F, H, W, 3] in 0..1 of the scenes' captions; image-to-video gets the first frames of `truth`."""
    videos = []
    for start in range(0, len(scenes), run.batch):
        part = truth[start : start + run.batch]
        shape = encode(vae, part[:1]).shape[1:]
        generator = torch.Generator().manual_seed(run.seed + start)
        noise = torch.randn(len(part), *shape, generator=generator).to(truth.device)
        image = None
        if experts["high"].config.in_channels == 36:
            image = image_rows(vae, part, torch.zeros(len(part), dtype=torch.bool, device=truth.device))
        captions = [scene.caption for scene in scenes[start : start + run.batch]]
        context = text.encode([*captions, ""])
        positive, negative = context[:-1], context[-1:].expand(len(part), -1, -1)
        latents = integrate(experts, noise, positive, negative, image, run)
        decoded = vae.decode(vae.denormalise(latents), chunk=None)
        videos.append(decoded.permute(0, 2, 3, 4, 1) / 2 + 0.5)
    return torch.cat(videos)


def integrate(
    experts: dict[str, WanModel],
    x: Tensor,
    positive: Tensor,
    negative: Tensor,
    image: Tensor | None,
    run: Sampling,
) -> Tensor:
    """Euler from noise to normalised latents, both branches every step unless the guidance is 1."""
    sigmas, timesteps = euler_schedule(run.steps, run.shift)
    for i, timestep in enumerate(timesteps):
        expert = experts["high" if timestep >= 1000 * run.boundary else "low"]
        time = torch.full((len(x),), timestep, device=x.device)
        given = x if image is None else torch.cat([x, image], dim=1)
        velocity = expert(given, time, positive)
        if run.guidance != 1:
            silent = expert(given, time, negative)
            velocity = silent + run.guidance * (velocity - silent)
        x = x + (sigmas[i + 1] - sigmas[i]) * velocity
    return x


def tally(verdicts: Sequence[Verdict], scenes: Sequence[Scene]) -> dict[str, object]:
    """Shares of true claims, and of right shapes by shape and right motions by motion."""
    row: dict[str, object] = {}
    for claim in CLAIMS:
        row[claim] = round(sum(getattr(v, claim) for v in verdicts) / len(verdicts), 4)
    for claim in ("shape", "motion"):
        by_word: dict[str, list[bool]] = {}
        for verdict, scene in zip(verdicts, scenes, strict=True):
            by_word.setdefault(getattr(scene, claim), []).append(getattr(verdict, claim))
        row[f"by_{claim}"] = {word: round(sum(right) / len(right), 2) for word, right in by_word.items()}
    return row


def contact_sheet(videos: Tensor) -> Tensor:
    """uint8 [rows, columns, 3]: one video a row, frames from first to last, a grey line between."""
    chosen = torch.linspace(0, videos.shape[1] - 1, min(SHEET_FRAMES, videos.shape[1])).round().long().to(videos.device)
    frames = torch.nn.functional.pad(videos[:, chosen], (0, 0, 0, 2, 0, 2), value=0.5)  # [B, f, H + 2, W + 2, 3]
    return (frames.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1) * 255).round().to(torch.uint8).cpu()
