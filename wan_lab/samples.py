"""Sample videos for calibration and comparison: captions and seeds, in batches.

Legend: B videos, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from wan_core.config import OptionError, Request
from wan_core.media.mp4 import Encoder, write_mp4
from wan_core.models.wan.families import find_task
from wan_core.pipeline.check import Job, given
from wan_core.pipeline.embedded import parse_caption
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY_DRIVEN
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.guided import stack_text
from wan_lab.driving import Trio, draw_trios
from wan_lab.shapes import SCENES, SIZE, draw, held_out, scene_table

# Default prompts for real models: people, animals, water, a moving camera, a still scene.
PROMPTS = (
    "a woman in a red coat walks along a rainy street at night, neon signs reflected in puddles",
    "a golden retriever runs across a meadow towards the camera, slow motion",
    "waves break against black rocks under a grey sky, seen from above",
    "a potter shapes a bowl on a turning wheel, close-up of wet hands",
    "a steam train crosses a stone viaduct in autumn mountains, the camera follows it",
    "a bowl of lemons on a wooden table, morning light, dust in the air",
)

DRAWN = "drawn-driving.mp4"  # a driving video of the embedded model's own
ROWS = ("cond", "concat", "known", "image_features")  # fields of `Conditioning` with a row for each video


@dataclass(frozen=True)
class Sample:
    """Caption and seed of one video. image: path of its first frame, where it is not that of the request. curved: a
    drawn driving video moves along a curve, not as the caption says."""

    caption: str
    seed: int
    image: str | None = None
    curved: bool = False


def choose_samples(prompts: Sequence[str] | None, count: int, seed: int, tiny: bool) -> list[Sample]:
    """`count` captions and seeds; `prompts` are used in turn. By default the embedded model (`tiny`) gets evenly spaced
    captions that it was not trained on, and other models get PROMPTS."""
    if not prompts:
        untrained = [scene.caption for scene in SCENES if held_out(scene)]
        spacing = max(1, len(untrained) // count)
        prompts = untrained[seed % spacing :: spacing] if tiny else PROMPTS
    return [Sample(prompts[i % len(prompts)], seed + i) for i in range(count)]


def read_samples(path: Path, count: int, seed: int) -> list[Sample]:
    """`count` samples of a file, its lines in turn: a JSON object each, `{"prompt": ..., "image": ...}`. An image is
    optional, and its path is relative to the file's folder. Raises OptionError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as fault:
        raise OptionError(f"cannot read the samples {path}: {getattr(fault, 'strerror', None) or fault}") from fault
    prompts = [_read_sample(line, f"line {number} of {path}") for number, line in enumerate(lines, 1)]
    if not prompts:
        raise OptionError(f"no samples in {path}: give a JSON object a line, with a prompt")
    samples = []
    for i in range(count):
        prompt, image = prompts[i % len(prompts)]
        samples.append(Sample(prompt, seed + i, None if image is None else str(path.parent / image)))
    return samples


def _read_sample(line: str, where: str) -> tuple[str, str | None]:
    """The prompt and the image of a line. Raises OptionError."""
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise OptionError(f"{where}: no JSON object: {fault}") from fault
    if not isinstance(sample, dict) or not {"prompt"} <= sample.keys() <= {"prompt", "image"}:
        raise OptionError(f'{where}: a sample is {{"prompt": TEXT}} or {{"prompt": TEXT, "image": FILE}}')
    if not all(isinstance(value, str) for value in sample.values()):
        raise OptionError(f"{where}: prompt and image are texts")
    return sample["prompt"], sample.get("image")


@dataclass(frozen=True)
class Batch:
    """Samples as one batch: encoded prompts and noise [B, C, T, Y, X]. `job` is the first sample's."""

    samples: Sequence[Sample]
    job: Job
    conditioning: Conditioning
    noise: Tensor


def batches(pipe: Pipeline, base: Request, samples: Sequence[Sample], size: int) -> Iterator[Batch]:
    """`samples` in batches of `size`, with the settings of `base` except caption and seed.

    If `base` has no image, the embedded image-to-video model gets the first frame of the drawn scene, and the driven
    one a picture of it, and a video in which another shape moves so; it is told nothing.
    """
    for start in range(0, len(samples), size):
        group = samples[start : start + size]
        jobs, conditionings = [], []
        for sample in group:
            request = replace(base, prompt=sample.caption, seed=sample.seed)
            with drawn_media(pipe.models.task.name, request, sample) as filled:
                run = pipe.prepare(filled)
                jobs.append(run.job)
                conditionings.append(pipe.encode(run))
        noise = torch.cat([draw_noise(job.request.seed, job.plan.latent_shape) for job in jobs])
        yield Batch(group, jobs[0], joined(conditionings), noise.to(pipe.models.device))


@contextmanager
def drawn_media(task: str, request: Request, sample: Sample) -> Iterator[Request]:
    """`request`, with the sample's own image, or with pictures and videos of the drawn scene where the embedded model
    needs some."""
    if sample.image is not None:
        yield replace(request, image=sample.image)
        return
    sides = {"width": given(request.width, SIZE), "height": given(request.height, SIZE)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if task == "i2v-tiny" and request.image is None:
            frame = draw([parse_caption(sample.caption)], seed=sample.seed, **sides)[0, :, 0]
            yield replace(request, image=save_frame(frame, folder / "first.png"))
        elif task == TINY_DRIVEN and request.pose_video is None:
            trio = drawn_trio(sample, **sides)
            driving = as_pixels(trio.driving[0].transpose(0, 1))
            video = write_mp4(folder / DRAWN, driving, fps=find_task(task).fps, encoder=Encoder(crf=10))
            picture = save_frame(trio.reference[0], folder / "reference.png")
            yield replace(request, prompt="", reference=picture, pose_video=str(video))
        else:
            yield request


def drawn_trio(sample: Sample, **sides: int) -> Trio:
    """What the driven model gets for a caption and a seed, and what is to come of it."""
    generator = torch.Generator().manual_seed(sample.seed)
    table = scene_table([parse_caption(sample.caption)])
    return draw_trios(table, generator=generator, curved_share=float(sample.curved), **sides)


def driving_frames(job: Job, sample: Sample) -> Tensor | None:
    """The drawn video [F, H, W, 3] that drives a sample; None where none does, or one that the user gave."""
    if job.task.name != TINY_DRIVEN or not job.request.pose_video or not job.request.pose_video.endswith(DRAWN):
        return None
    trio = drawn_trio(sample, width=job.width, height=job.height)
    return torch.from_numpy(as_pixels(trio.driving[0].transpose(0, 1)))


def save_frame(frame: Tensor, path: Path) -> str:
    """Write [3, H, W] in -1..1. Returns the path."""
    Image.fromarray(as_pixels(frame[None])[0]).save(path)
    return str(path)


def as_pixels(frames: Tensor) -> NDArray[np.uint8]:
    """[F, 3, H, W] in -1..1 -> uint8 [F, H, W, 3]."""
    return ((frames + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def joined(parts: Sequence[Conditioning]) -> Conditioning:
    """Conditionings of single videos of one task and size, combined to that of a batch."""

    def rows(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        return torch.cat(tensors) if tensors else None

    cond = stack_text([part.cond for part in parts], 1)
    fields: dict[str, Any] = {name: rows(name) for name in ROWS if name != "cond"}
    own = {name: [part.inputs[name] for part in parts] for name in parts[0].inputs}
    inputs = {name: torch.cat(each) if isinstance(each[0], Tensor) else each[0] for name, each in own.items()}
    return Conditioning(
        cond=cond, uncond=parts[0].uncond, inputs=inputs, uncond_inputs=parts[0].uncond_inputs, **fields
    )
