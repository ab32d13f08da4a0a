"""How often held-out captions come out right: background, colour, shape, motion, all four.

Shapes: B batch, z latent channels, F/H/W video frames, rows, columns, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tools.tiny.clips import Size, encode, held_out_scenes, image_rows
from tools.tiny.driven import latent_rows
from tools.tiny.files import part_path, report_sizes
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae
from wan_core.checkpoint.vision import load_vision
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.vision.clip import VisionEncoder
from wan_core.models.wan.families import choose_task
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.embedded import Scene
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import denoise
from wan_core.sampling.plan import Plan, make_plan
from wan_lab.driving import Trio, draw_trios, follows
from wan_lab.metrics import Verdict, describe, judge, psnr, verdict
from wan_lab.results import envelope, result_path, write_result
from wan_lab.shapes import draw, scene_table

CLAIMS = ("background", "colour", "shape", "motion", "all")
TASKS = {"t2v": "text-to-video", "i2v": "image-to-video"}
SHEET_CLIPS, SHEET_FRAMES = 12, 6


@torch.no_grad()
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
    vae = load_vae(part_path(folder, "vae"), device=device, dtype=torch.float32)
    text = load_text_encoder(part_path(folder, "text_encoder"), device=device, dtype=torch.float32)
    rows: list[dict[str, Any]] = []
    details: dict[str, dict[str, Any]] = {}
    print(f"{samples} held-out captions, {steps} steps of {solver}")
    print(" " * 42 + "".join(f"{claim:>12}" for claim in CLAIMS))
    for task in TASKS:
        paths = {name: part_path(folder, f"{task}_{name}") for name in ("high", "low")}
        if not all(path.is_file() for path in paths.values()):
            continue
        experts = {name: load_dit(path, device=device, dtype=torch.float32) for name, path in paths.items()}
        for size, guidance in product(sizes, guidances):
            plan = make_plan(
                task=f"{task}-tiny", steps=steps, solver=solver, guidance_high=guidance, guidance_low=guidance
            )
            row, detail, videos = measure(plan, experts, vae, text, size, samples, batch, seed)
            details[row["name"]] = detail
            rows.append(row)
            print(f"{row['name']:<42}" + "".join(f"{row[c]:>12.1%}" for c in CLAIMS), detail, flush=True)
            sheet = Image.fromarray(contact_sheet(videos[:SHEET_CLIPS]).numpy())
            sheet.save(sheets_of(out) / f"{task}_{size.width}x{size.height}_guidance{guidance:g}.png")
    if part_path(folder, "driven").is_file():
        for size in sizes:
            row, videos = measure_driven(folder, vae, text, size, samples, steps, solver, batch, seed)
            rows.append(row)
            print(f"{row['name']:<42}" + "".join(f"{row[c]:>12.1%}" for c in CLAIMS), flush=True)
            Image.fromarray(contact_sheet(videos[:SHEET_CLIPS]).numpy()).save(
                sheets_of(out) / f"driven_{size.width}x{size.height}.png"
            )
    result = envelope("embedded", device, rows, program="tools.train_tiny") | {
        "steps": steps,
        "solver": solver,
        "seed": seed,
        "details": details,
    }
    print(write_result(result, result_path(out, result["suite"], device)))
    report_sizes(folder)


def measure(
    plan: Plan,
    experts: dict[str, WanModel],
    vae: VideoVAE,
    text: TextEncoder,
    size: Size,
    samples: int,
    batch: int,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    """The row of a size and a guidance, what it hides, and the videos."""
    task, scenes = plan.task.removesuffix("-tiny"), held_out_scenes(samples)
    device = vae.conv1.weight.device
    truth = draw(scenes, seed=seed, frames=size.frames, height=size.height, width=size.width).to(device)
    begin = time.monotonic()
    videos = generate(plan, experts, vae, text, scenes, truth, batch=batch, seed=seed)
    seconds = time.monotonic() - begin
    seen = [describe(video) for video in videos]
    verdicts = [verdict(one, scene) for one, scene in zip(seen, scenes, strict=True)]
    guidance = plan.steps[0].guidance
    name = f"{TASKS[task]}, guidance {guidance:g}" + ("" if size == Size() else f", {size}")
    row = {
        "name": name,
        "size": str(size),
        "samples": samples,
        **shares(verdicts),
        "seconds": round(seconds / samples, 4),
    }
    detail: dict[str, Any] = {claim: by_word(verdicts, scenes, claim) for claim in ("shape", "motion")}
    detail["overlap"] = by_shape([one.overlap for one in seen], scenes)
    if task == "i2v":
        first = truth[:, :, :1].permute(0, 2, 3, 4, 1) / 2 + 0.5
        distances = [psnr(video[:1], given) for video, given in zip(videos, first, strict=True)]
        detail["first_frame_psnr"] = round(sum(distances) / samples, 2)
    return row, detail, videos


def by_shape(overlaps: Sequence[float], scenes: Sequence[Scene]) -> dict[str, float]:
    """Mean overlap with the best template for each shape: how well it is drawn."""
    found: dict[str, list[float]] = {}
    for overlap, scene in zip(overlaps, scenes, strict=True):
        found.setdefault(scene.shape, []).append(overlap)
    return {shape: round(sum(values) / len(values), 4) for shape, values in found.items()}


def sheets_of(out: Path) -> Path:
    return out if out.suffix != ".json" else out.parent


def measure_driven(
    folder: Path,
    vae: VideoVAE,
    text: TextEncoder,
    size: Size,
    samples: int,
    steps: int,
    solver: str,
    batch: int,
    seed: int,
) -> tuple[dict[str, Any], Tensor]:
    """The row of the driven model, whose motion is right where it follows the driving video, half of those along
    curves, and what was given and made, side by side."""
    device = vae.conv1.weight.device
    model = load_dit(part_path(folder, "driven"), device=device, dtype=torch.float32)
    vision = load_vision(part_path(folder, "clip_vision"), device=device, dtype=torch.float32)
    scenes = held_out_scenes(samples)
    sides = {"frames": size.frames, "height": size.height, "width": size.width}
    generator = torch.Generator().manual_seed(seed)
    trio = draw_trios(scene_table(scenes), generator=generator, curved_share=0.5, **sides)
    plan = make_plan(task="animate2-tiny", steps=steps, solver=solver)
    begin, made = time.monotonic(), []
    for start in range(0, samples, batch):
        part = Trio(*(value[start : start + batch].to(device) for value in vars(trio).values()))
        conditioning, shape = driven_conditioning(vae, vision, text, part)
        noise = torch.cat([draw_noise(seed + start + i, shape) for i in range(len(part.made))]).to(device)
        latents = denoise(plan, lambda _: model, conditioning, noise, batched=True)
        made.append(vae.decode(vae.denormalise(latents[:, :, 1:]), chunk=None))
    seconds = time.monotonic() - begin
    videos, driving = (v.permute(0, 2, 3, 4, 1) / 2 + 0.5 for v in (torch.cat(made), trio.driving.to(device)))
    verdicts = [
        replace(judge(video, scene), motion=follows(video, driven))
        for video, scene, driven in zip(videos, scenes, driving, strict=True)
    ]
    name = "driven" if size == Size() else f"driven, {size}"
    numbers = {"samples": samples, **shares(verdicts), "seconds": round(seconds / samples, 4)}
    given = trio.reference.to(device).permute(0, 2, 3, 1)[:, None].expand_as(videos) / 2 + 0.5
    return {"name": name, "size": str(size), **numbers}, torch.cat([given, driving, videos], 3)


def driven_conditioning(
    vae: VideoVAE, vision: VisionEncoder, text: TextEncoder, trio: Trio
) -> tuple[Conditioning, tuple[int, ...]]:
    """For a batch of first clips without a prompt, and the shape of one's latents."""
    rows = latent_rows(vae, trio, torch.zeros(len(trio.made), dtype=torch.bool, device=trio.made.device))
    pose = rows["pose"]
    inputs = {
        "unconditional": False,
        "log_scale": 0.0,
        "pose": torch.cat([pose, torch.ones_like(pose[:, :4]), pose], 1),
        "pose_image": vision(trio.driving[:, :, 0]),
    }
    features = vision(trio.reference)
    conditioning = Conditioning(cond=text.encode([""]), concat=rows["image"], image_features=features, inputs=inputs)
    return conditioning, (1, *rows["latent"].shape[1:])


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
    for one, scene in zip(verdicts, scenes, strict=True):
        found.setdefault(getattr(scene, claim), []).append(getattr(one, claim))
    return {word: round(sum(right) / len(right), 2) for word, right in found.items()}


def contact_sheet(videos: Tensor) -> Tensor:
    """uint8 [rows, columns, 3]: one video a row, frames from first to last, a grey line between."""
    chosen = torch.linspace(0, videos.shape[1] - 1, min(SHEET_FRAMES, videos.shape[1])).round().long().to(videos.device)
    frames = torch.nn.functional.pad(videos[:, chosen], (0, 0, 0, 2, 0, 2), value=0.5)  # [B, f, H + 2, W + 2, 3]
    return (frames.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1) * 255).round().to(torch.uint8).cpu()
