"""How often held-out captions come out right: background, colour, shape, motion, all four.

Shapes: B batch, z latent channels, F/H/W video frames, rows, columns, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tools.tiny.clips import Size, encode, held_out_scenes, image_rows
from tools.tiny.files import part_path, report_sizes
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae
from wan_core.media.metrics import Verdict, judge, psnr
from wan_core.media.shapes import Scene, draw
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families import choose_task
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.evaluate.results import envelope, result_path, write_result
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import denoise
from wan_core.sampling.plan import Plan, make_plan

CLAIMS = ("background", "colour", "shape", "motion", "all")
TASKS = {"t2v": "text-to-video", "i2v": "image-to-video"}
SHEET_CLIPS, SHEET_FRAMES = 12, 6


@torch.no_grad()
def evaluate(
    folder: Path,
    out: Path,
    *,
    size: Size,
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
    vae = load_vae(part_path(folder, "vae"), device=device, dtype=torch.float32)
    text = load_text_encoder(part_path(folder, "text_encoder"), device=device, dtype=torch.float32)
    scenes = held_out_scenes(samples)
    truth = draw(scenes, seed=seed, frames=size.frames, height=size.height, width=size.width).to(device)
    rows: list[dict[str, Any]] = []
    details: dict[str, dict[str, Any]] = {}
    print(f"{samples} held-out captions, {steps} steps of {solver}")
    print(" " * 28 + "".join(f"{claim:>12}" for claim in CLAIMS))
    for task in ("t2v", "i2v"):
        paths = {name: part_path(folder, f"{task}_{name}") for name in ("high", "low")}
        if not all(path.is_file() for path in paths.values()):
            continue
        experts = {name: load_dit(path, device=device, dtype=torch.float32) for name, path in paths.items()}
        for guidance in guidances:
            plan = make_plan(
                task=f"{task}-tiny", steps=steps, solver=solver, guidance_high=guidance, guidance_low=guidance
            )
            begin = time.monotonic()
            videos = generate(plan, experts, vae, text, scenes, truth, batch=batch, seed=seed)
            seconds = time.monotonic() - begin
            verdicts = [judge(video, scene) for video, scene in zip(videos, scenes, strict=True)]
            name = f"{TASKS[task]}, guidance {guidance:g}"
            row = {"name": name, "samples": samples, **shares(verdicts), "seconds": round(seconds / samples, 4)}
            details[name] = {claim: by_word(verdicts, scenes, claim) for claim in ("shape", "motion")}
            if task == "i2v":
                first = truth[:, :, :1].permute(0, 2, 3, 4, 1) / 2 + 0.5
                distances = [psnr(video[:1], given) for video, given in zip(videos, first, strict=True)]
                details[name]["first_frame_psnr"] = round(sum(distances) / samples, 2)
            rows.append(row)
            print(f"{name:<28}" + "".join(f"{row[claim]:>12.1%}" for claim in CLAIMS), details[name], flush=True)
            sheets = out if out.suffix != ".json" else out.parent
            sheet = Image.fromarray(contact_sheet(videos[:SHEET_CLIPS]).numpy())
            sheet.save(sheets / f"{task}_guidance{guidance:g}.png")
    result = envelope("embedded", device, rows, program="tools.train_tiny") | {
        "steps": steps,
        "solver": solver,
        "seed": seed,
        "details": details,
    }
    print(write_result(result, result_path(out, result["suite"], device)))
    report_sizes(folder)


def generate(
    plan: Plan,
    experts: dict[str, WanModel],
    vae: VideoVAE,
    text: TextEncoder,
    scenes: Sequence[Scene],
    truth: Tensor,
    *,
    batch: int,
    seed: int,
) -> Tensor:
    """Videos [B, F, H, W, 3] in 0..1 of the scenes' captions; image-to-video gets the first frames of `truth`.

    Each video has a seed of its own, `seed` plus its number, and is what `python -m wan_core generate` makes of it.
    """
    videos = []
    for start in range(0, len(scenes), batch):
        part = truth[start : start + batch]
        shape = encode(vae, part[:1]).shape
        noise = torch.cat([draw_noise(seed + start + i, tuple(shape)) for i in range(len(part))]).to(truth.device)
        image = None
        if choose_task(experts["high"].config).task.image == "channels":
            image = image_rows(vae, part, torch.zeros(len(part), dtype=torch.bool, device=truth.device))
        rows = text.encode([*(scene.caption for scene in scenes[start : start + batch]), ""])
        conditioning = Conditioning(cond=rows[:-1], uncond=rows[-1:], concat=image)
        latents = denoise(plan, experts.__getitem__, conditioning, noise, batched=True)
        videos.append(vae.decode(vae.denormalise(latents), chunk=None).permute(0, 2, 3, 4, 1) / 2 + 0.5)
    return torch.cat(videos)


def shares(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """How many of the claims are true, and how many videos are right in all of them (`all`)."""
    return {
        claim: round(sum(getattr(v, "all_true" if claim == "all" else claim) for v in verdicts) / len(verdicts), 4)
        for claim in CLAIMS
    }


def by_word(verdicts: Sequence[Verdict], scenes: Sequence[Scene], claim: str) -> dict[str, float]:
    """The share of right shapes for each shape, or of right motions for each motion."""
    found: dict[str, list[bool]] = {}
    for verdict, scene in zip(verdicts, scenes, strict=True):
        found.setdefault(getattr(scene, claim), []).append(getattr(verdict, claim))
    return {word: round(sum(right) / len(right), 2) for word, right in found.items()}


def contact_sheet(videos: Tensor) -> Tensor:
    """uint8 [rows, columns, 3]: one video a row, frames from first to last, a grey line between."""
    chosen = torch.linspace(0, videos.shape[1] - 1, min(SHEET_FRAMES, videos.shape[1])).round().long().to(videos.device)
    frames = torch.nn.functional.pad(videos[:, chosen], (0, 0, 0, 2, 0, 2), value=0.5)  # [B, f, H + 2, W + 2, 3]
    return (frames.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1) * 255).round().to(torch.uint8).cpu()
