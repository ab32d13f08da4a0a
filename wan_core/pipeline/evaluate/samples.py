"""The videos to measure on: captions and seeds, several of them as one batch.

Legend: B videos, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from wan_core.config import Request
from wan_core.media.shapes import SCENES, draw, held_out, parse_caption
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.resolved_request import Job
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import stack_text

# For models of the real world, where nothing better is given: people, animals, water, a camera that moves, a still.
PROMPTS = (
    "a woman in a red coat walks along a rainy street at night, neon signs reflected in puddles",
    "a golden retriever runs across a meadow towards the camera, slow motion",
    "waves break against black rocks under a grey sky, seen from above",
    "a potter shapes a bowl on a turning wheel, close-up of wet hands",
    "a steam train crosses a stone viaduct in autumn mountains, the camera follows it",
    "a bowl of lemons on a wooden table, morning light, dust in the air",
)


@dataclass(frozen=True)
class Sample:
    """One video to make."""

    caption: str
    seed: int


def choose_samples(prompts: Sequence[str] | None, count: int, seed: int, tiny: bool) -> list[Sample]:
    """`count` captions and seeds. Given prompts take turns; otherwise the embedded model (`tiny`) gets captions that it
    was not trained on, evenly spread, and others a few of the real world."""
    if not prompts:
        held = [scene.caption for scene in SCENES if held_out(scene)]
        spread = max(1, len(held) // count)
        prompts = held[seed % spread :: spread] if tiny else PROMPTS
    return [Sample(prompts[i % len(prompts)], seed + i) for i in range(count)]


@dataclass(frozen=True)
class Batch:
    """Some samples as one: prompts encoded, noise drawn [B, C, T, Y, X]. `job` is the first one's."""

    samples: Sequence[Sample]
    job: Job
    conditioning: Conditioning
    noise: Tensor


def batches(pipe: Pipeline, base: Request, samples: Sequence[Sample], size: int) -> Iterator[Batch]:
    """`samples` in groups of `size`, each as `base` but for caption and seed.

    The embedded model's image variant gets the first frame of the drawn scene if `base` has no image.
    """
    for start in range(0, len(samples), size):
        group = samples[start : start + size]
        jobs, conditionings = [], []
        for sample in group:
            request = replace(base, prompt=sample.caption, seed=sample.seed)
            with first_frame(pipe, request, sample) as filled:
                job = pipe.prepare(filled)
                jobs.append(job)
                conditionings.append(pipe.encode(job))
        noise = torch.cat([draw_noise(job.request.seed, job.latent_shape) for job in jobs])
        yield Batch(group, jobs[0], joined(conditionings), noise.to(pipe.models.device))


def one_by_one(batch: Batch) -> Iterator[Batch]:
    """The videos of a batch, each as one of its own."""

    def row(rows: Tensor | None, n: int) -> Tensor | None:
        return None if rows is None else rows[n : n + 1]

    for n, sample in enumerate(batch.samples):
        c = batch.conditioning
        part = replace(
            c,
            cond=c.cond[n : n + 1],
            concat=row(c.concat, n),
            known=row(c.known, n),
            image_features=row(c.image_features, n),
        )
        yield replace(batch, samples=[sample], conditioning=part, noise=batch.noise[n : n + 1])


@contextmanager
def first_frame(pipe: Pipeline, request: Request, sample: Sample) -> Iterator[Request]:
    """`request` with an image, where the embedded image-to-video model needs one: the scene's own first frame."""
    if pipe.models.task.name != "i2v-tiny" or request.image is not None:
        yield request
        return
    frame = draw([parse_caption(sample.caption)], seed=sample.seed)[0, :, 0]  # [3, H, W] in -1..1
    pixels = ((frame + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "first.png"
        Image.fromarray(pixels).save(path)
        yield replace(request, image=str(path))


def joined(parts: Sequence[Conditioning]) -> Conditioning:
    """Conditionings of one video each, of one task and size, as that of a batch."""

    def rows(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        return torch.cat(found) if found else None

    cond = stack_text([part.cond for part in parts], 1)
    inputs = {name: rows(name) for name in ("concat", "known", "image_features")}
    return Conditioning(cond=cond, uncond=parts[0].uncond, **inputs)
