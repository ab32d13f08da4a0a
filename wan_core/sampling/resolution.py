"""Steps at a part of the width and height: what the model sees there, and what its prediction says of the whole video.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns; y/x rows and columns at the smaller size.

The latents of a run keep their size. A smaller step shows the model D x, where D takes the mean over areas and has
orthonormal rows: white noise of variance 1 is white and of variance 1 after it. It makes a video r times as large, with
r the root of the ratio of the sizes, so D x / (r * (1 - sigma) + sigma) is the noisy sample of the smaller video at the
sigma that `wan_core.sampling.stages` derives. Of the video x0 that the model predicts there, the whole one has the low
frequencies; the high ones are those of the last prediction at full size, or 0 before there is one:

    x0 = D' (r * x0_small) + (1 - D' D) x0_before      velocity = (x - x0) / sigma

So the run goes on with the noise that it began with, at every frequency: no noise is drawn where the size changes, the
solver's history stays what it is, and the same seed gives the same video on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.plan import Plan
from wan_core.sampling.schedules import shifted
from wan_core.sampling.stages import smaller
from wan_core.sampling.steps import Step


@dataclass(frozen=True)
class SmallerSize:
    """Between latents of a video and those of a smaller one. rows [y, Y], columns [x, X]: float32, orthonormal rows."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, size: tuple[int, int], scale: float, patch: tuple[int, int], device: torch.device) -> SmallerSize:
        """size: rows and columns of the video's latents."""
        small = smaller(size, scale, patch)
        made = [mean_over_areas(few, many) for few, many in zip(small, size, strict=True)]
        if device.type == "cuda":  # pinned, so that the host does not wait for the steps before
            made = [rows.pin_memory() for rows in made]
        rows, columns = (one.to(device, non_blocking=True) for one in made)
        return cls(rows, columns)

    @property
    def ratio(self) -> float:
        """How much larger a video is after `down`: r."""
        return sqrt(self.rows.shape[1] * self.columns.shape[1] / (self.rows.shape[0] * self.columns.shape[0]))

    @property
    def spacing(self) -> tuple[float, float]:
        """Rows and columns of the video from one of the smaller size to the next."""
        return self.rows.shape[1] / self.rows.shape[0], self.columns.shape[1] / self.columns.shape[0]

    def down(self, x: Tensor) -> Tensor:
        """[B, C, T, Y, X] -> [B, C, T, y, x]."""
        return self.rows @ x @ self.columns.T

    def up(self, x: Tensor) -> Tensor:
        """[B, C, T, y, x] -> [B, C, T, Y, X], the transpose of `down`."""
        return self.rows.T @ x @ self.columns

    def sample(self, x: Tensor, sigma: float) -> Tensor:
        """The noisy sample of the smaller video, [B, C, T, y, x]."""
        return self.down(x) / (self.ratio * (1 - sigma) + sigma)

    def video(self, sample: Tensor, velocity: Tensor, sigma: float, before: Tensor | None) -> Tensor:
        """The whole video [B, C, T, Y, X] that the model's velocity [B, C, T, y, x] at `sample` predicts. before: the
        last prediction of it."""
        video = self.up((sample - velocity * shifted(sigma, 1 / self.ratio)) * self.ratio)
        return video if before is None else video + before - self.up(self.down(before))


class Resolution:
    """The sizes of the steps of one run, and the video [B, C, T, Y, X] that its last step predicted, which it keeps
    where the plan has steps of a smaller size."""

    def __init__(self, plan: Plan, conditioning: Conditioning, video: Tensor | None = None) -> None:
        self.conditioning = conditioning
        self.varies = bool(plan.stages)
        self.video = video
        self.sizes: dict[float, tuple[SmallerSize | None, Conditioning]] = {1.0: (None, conditioning)}

    def of(self, step: Step, x: Tensor, patch: tuple[int, int]) -> tuple[SmallerSize | None, Conditioning]:
        """The size of `step` in a run whose latents are `x`, None for theirs, and the conditioning at that size."""
        if step.scale not in self.sizes:
            size = SmallerSize.of((x.shape[3], x.shape[4]), step.scale, patch, x.device)
            self.sizes[step.scale] = size, smaller_conditioning(self.conditioning, size)
        return self.sizes[step.scale]

    def whole(self, x: Tensor, sample: Tensor, velocity: Tensor, step: Step, size: SmallerSize | None) -> Tensor:
        """The velocity of the latents `x` [B, C, T, Y, X] of the run, of that at the model's input `sample`."""
        if not self.varies:
            return velocity
        if size is None:
            self.video = x - velocity * step.sigma
            return velocity
        self.video = size.video(sample, velocity, step.sigma, self.video)
        return (x - self.video) / step.sigma


def smaller_conditioning(conditioning: Conditioning, size: SmallerSize) -> Conditioning:
    """`conditioning` with known frames, and the channels of an image with their mask, at the smaller size."""
    concat, first_frames = (
        None if tensor is None else size.down(tensor.float()) / size.ratio
        for tensor in (conditioning.concat, conditioning.known)
    )
    return replace(conditioning, concat=concat, known=first_frames)


def mean_over_areas(small: int, large: int) -> Tensor:
    """float32 [small, large]: the mean over each of `small` equal areas of `large` elements, with orthonormal rows.

    Where areas cut elements, neighbours share them and their means are correlated: the inverse root of the product of
    all rows with each other takes that away, and leaves a constant a constant.
    """
    edges = torch.arange(small + 1, dtype=torch.float64) * (large / small)
    first = torch.arange(large, dtype=torch.float64)
    covered = torch.minimum(edges[1:, None], first + 1) - torch.maximum(edges[:-1, None], first)
    areas = covered.clamp(min=0)
    values, vectors = torch.linalg.eigh(areas @ areas.T)
    return (vectors * values.rsqrt() @ vectors.T @ areas).float()
