"""Sample videos for calibration and comparison: captions and seeds, in batches.

Legend: B videos, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from wan_core.config import Request
from wan_core.media.shapes import SCENES, draw, held_out, parse_caption
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.resolved_request import Job
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import stack_text

# Default prompts for real models: people, animals, water, a moving camera, a still scene.
PROMPTS = (
    "a woman in a red coat walks along a rainy street at night, neon signs reflected in puddles",
    "a golden retriever runs across a meadow towards the camera, slow motion",
    "waves break against black rocks under a grey sky, seen from above",
    "a potter shapes a bowl on a turning wheel, close-up of wet hands",
    "a steam train crosses a stone viaduct in autumn mountains, the camera follows it",
    "a bowl of lemons on a wooden table, morning light, dust in the air",
)

ROWS = ("cond", "concat", "known", "image_features")  # fields of `Conditioning` with a row for each video


@dataclass(frozen=True)
class Sample:
    """Caption and seed of one video."""

    caption: str
    seed: int


def choose_samples(prompts: Sequence[str] | None, count: int, seed: int, tiny: bool) -> list[Sample]:
    """`count` captions and seeds; `prompts` are used in turn. By default the embedded model (`tiny`) gets evenly spaced
    captions that it was not trained on, and other models get PROMPTS."""
    if not prompts:
        untrained = [scene.caption for scene in SCENES if held_out(scene)]
        spacing = max(1, len(untrained) // count)
        prompts = untrained[seed % spacing :: spacing] if tiny else PROMPTS
    return [Sample(prompts[i % len(prompts)], seed + i) for i in range(count)]


@dataclass(frozen=True)
class Batch:
    """Samples as one batch: encoded prompts and noise [B, C, T, Y, X]. `job` is the first sample's."""

    samples: Sequence[Sample]
    job: Job
    conditioning: Conditioning
    noise: Tensor


def batches(pipe: Pipeline, base: Request, samples: Sequence[Sample], size: int) -> Iterator[Batch]:
    """`samples` in batches of `size`, with the settings of `base` except caption and seed.

    If `base` has no image, the embedded image-to-video model gets the first frame of the drawn scene.
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
    """The videos of a batch, each as a batch of one."""
    given = {name: rows for name in ROWS if (rows := getattr(batch.conditioning, name)) is not None}
    for n, sample in enumerate(batch.samples):
        part = replace(batch.conditioning, **{name: rows[n : n + 1] for name, rows in given.items()})
        yield replace(batch, samples=[sample], conditioning=part, noise=batch.noise[n : n + 1])


@contextmanager
def first_frame(pipe: Pipeline, request: Request, sample: Sample) -> Iterator[Request]:
    """`request`, with the drawn scene's first frame as image if the embedded image-to-video model needs one."""
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
    """Conditionings of single videos of one task and size, combined to that of a batch."""

    def rows(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        return torch.cat(tensors) if tensors else None

    cond = stack_text([part.cond for part in parts], 1)
    inputs: dict[str, Any] = {name: rows(name) for name in ROWS if name != "cond"}
    return Conditioning(cond=cond, uncond=parts[0].uncond, **inputs)
