"""Training data: drawn clips, and a bank of their latents that keeps growing while training runs.

Shapes: N bank size, B batch, z latent channels, F/H/W video frames, rows, columns, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.models.vae.vae import VideoVAE
from wan_core.pipeline.embedded import Scene
from wan_lab.shapes import SCENES, held_out, render, sample_paths, scene_table

TRAINED = tuple(scene for scene in SCENES if not held_out(scene))
HELD_OUT = tuple(scene for scene in SCENES if held_out(scene))
LAST_FRAME_SHARE = 0.15  # of image-to-video clips whose last frame is given as well as the first


def held_out_scenes(count: int) -> list[Scene]:
    """The first `count` of a fixed order in which neighbours differ widely; it starts again after all of them."""
    return [HELD_OUT[37 * i % len(HELD_OUT)] for i in range(count)]


@dataclass(frozen=True)
class Size:
    frames: int = 17
    height: int = 96
    width: int = 96

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    def share_of(self, count: int) -> int:
        """How many videos of this size are about as much work as `count` of 96x96, in eights."""
        return max(1, count * 96 * 96 // (self.height * self.width * 8) * 8) if count >= 8 else count


class Drawing:
    """Draws random clips of the scenes that may be trained on."""

    def __init__(self, size: Size, device: torch.device, seed: int) -> None:
        self.size = size
        self.table = scene_table(TRAINED).to(device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Clips [count, 3, F, H, W] in -1..1 and the index of each one's scene in TRAINED [count]."""
        device = self.generator.device
        scene = torch.randint(len(self.table), (count,), generator=self.generator, device=device)
        size = self.size
        paths = sample_paths(self.table[scene], height=size.height, width=size.width, generator=self.generator)
        return render(paths, frames=size.frames, height=size.height, width=size.width), scene


class Ring:
    """Rows of tensors on the device, the oldest replaced when it is full. `sample` works inside a CUDA graph."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.added = 0
        self.rows: dict[str, Tensor] = {}
        self.count: Tensor | None = None  # float32 scalar on the device: rows that are filled

    def add(self, **rows: Tensor) -> None:
        for name, new in rows.items():
            if name not in self.rows:
                self.rows[name] = new.new_empty(self.capacity, *new.shape[1:])
            where = (torch.arange(len(new), device=new.device) + self.added) % self.capacity
            self.rows[name][where] = new
        added = next(iter(rows.values()))
        self.added += len(added)
        if self.count is None:
            self.count = torch.zeros((), device=added.device)
        self.count.fill_(min(self.added, self.capacity))

    def grow(self, count: int) -> None:
        """Make and add `count` rows."""
        raise NotImplementedError

    def sample(self, batch: int) -> dict[str, Tensor]:
        assert self.count is not None
        index = (torch.rand(batch, device=self.count.device) * self.count).long()
        return {name: rows[index] for name, rows in self.rows.items()}


class ClipRing(Ring):
    """Clips for the VAE, as uint8: {"clip": [B, 3, F, H, W]}."""

    def __init__(self, drawing: Drawing, capacity: int) -> None:
        super().__init__(capacity)
        self.drawing = drawing

    def grow(self, count: int) -> None:
        clips, _ = self.drawing.draw(count)
        self.add(clip=((clips + 1) * 127.5).round().to(torch.uint8))


class LatentRing(Ring):
    """Normalised latents for the transformers: {"latent": [B, z, T, Y, X], "outline": as of `outline_rows`, "scene":
    [B]}, and with `image` {"image": [B, 4 + z, T, Y, X]}, the mask and image channels of image-to-video."""

    def __init__(self, drawing: Drawing, vae: VideoVAE, capacity: int, image: bool) -> None:
        super().__init__(capacity)
        self.drawing, self.vae, self.image = drawing, vae, image

    @torch.no_grad()
    def grow(self, count: int) -> None:
        clips, scene = self.drawing.draw(count)
        rows = {"latent": encode(self.vae, clips), "outline": outline_rows(clips), "scene": scene}
        if self.image:
            last = torch.rand(count, device=clips.device) < LAST_FRAME_SHARE
            rows["image"] = image_rows(self.vae, clips, last)
        self.add(**rows)


def encode(vae: VideoVAE, clips: Tensor) -> Tensor:
    """Normalised latents, float32 [B, z, T, Y, X], of clips in -1..1."""
    return vae.normalise(vae.encode(clips, chunk=None))


def outline_rows(clips: Tensor) -> Tensor:
    """Which latents of clips [B, 3, F, H, W] hold an outline, or are within two pixels of one: bool [B, 1, T, Y, X]."""
    frames = clips.transpose(1, 2).flatten(0, 1)  # [B * F, 3, H, W]
    span = F.max_pool2d(frames, 5, 1, 2) + F.max_pool2d(-frames, 5, 1, 2)
    near = F.max_pool2d(span.amax(1, keepdim=True), 8).unflatten(0, (len(clips), -1)).transpose(1, 2)
    later = F.max_pool3d(near[:, :, 1:], (4, 1, 1)) if clips.shape[2] > 1 else near[:, :, :0]
    return torch.cat([near[:, :, :1], later], 2) > 0.1


def image_rows(vae: VideoVAE, clips: Tensor, last: Tensor) -> Tensor:
    """`image_channels` of the family `wan` for a batch: [B, 4 + z, T, Y, X], given the first frame of every clip, and
    the last frame where `last` [B] is True."""
    batch, _, frames = clips.shape[:3]
    known_frames = torch.zeros(batch, frames, device=clips.device)
    known_frames[:, 0] = 1
    known_frames[:, -1] = torch.where(last, 1.0, known_frames[:, -1])
    latents = encode(vae, clips * known_frames[:, None, :, None, None])
    # Four mask channels, one for each video frame of a latent frame; the first frame is alone and counts four times.
    mask = torch.cat([known_frames[:, :1].expand(-1, 4), known_frames[:, 1:]], dim=1)
    mask = mask.unflatten(1, (-1, 4)).transpose(1, 2)  # [B, 4, T]
    return torch.cat([mask[..., None, None].expand(-1, -1, -1, *latents.shape[-2:]), latents], dim=1)


def fill(ring: Ring, count: int, chunk: int, seconds: float) -> float:
    """Add rows until there are `count` or the seconds are over, but two chunks in any case: the first tunes kernels.
    Returns seconds per chunk, warmed up.
    """
    begin, per_chunk = time.monotonic(), 0.0
    while ring.added < count and (ring.added <= chunk or time.monotonic() - begin < seconds):
        start = time.monotonic()
        ring.grow(chunk)
        assert ring.count is not None
        if ring.count.is_cuda:
            torch.cuda.synchronize()
        per_chunk = time.monotonic() - start
    print(f"{ring.added} clips in {time.monotonic() - begin:.1f} s, {1e3 * per_chunk / chunk:.2f} ms each", flush=True)
    return per_chunk


def keep_growing(rings: Sequence[tuple[Ring, int, float]], share: float) -> Callable[[int], None]:
    """A `between` for Trainer.run that spends about `share` of the time on new clips. rings: they get them in turn;
    each with its chunk and the seconds that one takes."""
    spent, begin, grown = 0.0, time.monotonic(), 0

    def between(step: int) -> None:
        nonlocal spent, grown
        ring, chunk, seconds = rings[grown % len(rings)]
        if step and spent + seconds < share * (time.monotonic() - begin):
            ring.grow(chunk)
            spent, grown = spent + seconds, grown + 1

    return between
