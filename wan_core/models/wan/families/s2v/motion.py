"""Tokens beside the video's in S2V, and the position of every token.

A sequence is [video | reference | motion]. Motion frames are the latents of the frames before the clip: the newest one
at full size, two before it in patches of 2 x 4 x 4, sixteen before those in patches of 4 x 8 x 8.

Legend: B batch, L tokens, T/Y/X frames, rows, columns of tokens; Tm latent frames of motion, C channels, D head dim.
Source: Wan2.2/wan/modules/s2v/motioner.py (FramePackMotioner), s2v_utils.py (rope_precompute).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.s2v.config import MOTION_FRAMES, S2VConfig
from wan_core.models.wan.model import patch_product
from wan_core.models.wan.rope import THETA

REFERENCE_FRAME = 30  # its position in time
Grid = tuple[int, int, int]
Places = tuple[Sequence[float], ...]  # in time, rows and columns


class FramePacker(nn.Module):
    """Latents [B, 16, Tm, 2 Y, 2 X] before the clip -> tokens [B, M, C], the newest frame's first."""

    def __init__(self, config: S2VConfig) -> None:
        super().__init__()
        channels, dim = config.in_channels, config.dim
        self.proj = nn.Conv3d(channels, dim, (1, 2, 2), (1, 2, 2))
        self.proj_2x = nn.Conv3d(channels, dim, (2, 4, 4), (2, 4, 4))
        self.proj_4x = nn.Conv3d(channels, dim, (4, 8, 8), (4, 8, 8))

    def forward(self, latents: Tensor) -> Tensor:
        latents = latents[:, :, -sum(MOTION_FRAMES) :]
        latents = F.pad(latents, (0, 0, 0, 0, sum(MOTION_FRAMES) - latents.shape[2], 0))
        oldest, older, newest = latents.split(MOTION_FRAMES, 2)
        pairs = (newest, self.proj), (older, self.proj_2x), (oldest, self.proj_4x)
        return torch.cat([_patches(x, conv) for x, conv in pairs], 1)


def _patches(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """What does not fill a patch is left out."""
    pt, py, px = conv.kernel_size
    T, Y, X = x.shape[2] // pt, x.shape[3] // py, x.shape[4] // px
    return patch_product(x[:, :, : T * pt, : Y * py, : X * px], conv, (T, Y, X))


def position_table(
    grid: Grid, axes: Grid, device: torch.device, *, reference: bool, motion: bool, comfyui: bool = False
) -> Tensor:
    """The rotation of every token of a video of `grid` and of what follows it: float32 [L, 1, D/2, 2] holding
    (cos, sin).

    comfyui: motion frames where ComfyUI has them: the oldest at -19 .. -16 in time, and rows and columns of larger
    patches between whole ones, not cut off to whole ones.
    """
    T, Y, X = grid
    rows, columns = range(Y), range(X)
    parts: list[Places] = [(range(T), rows, columns)]
    if reference:
        parts.append(([REFERENCE_FRAME], rows, columns))
    if motion:
        oldest = range(-19, -15) if comfyui else (-19, -14, -9, -4)
        parts.append(([-1], rows, columns))
        parts += [
            (times, *(spread(side, side // every, whole=not comfyui) for side in (Y, X)))
            for times, every in (([-3], 2), (oldest, 4))
        ]
    angle = torch.cat([_angles(places, axes, device) for places in parts])
    return torch.stack([angle.cos(), angle.sin()], -1)[:, None].float()


def spread(side: int, count: int, *, whole: bool) -> list[float]:
    """So many places from the first to the last of a side; `whole`: cut off to whole ones, as in the reference."""
    places = np.linspace(0, side - 1, count)
    return (places.astype(int) if whole else places).tolist()


def _angles(places: Places, axes: Grid, device: torch.device) -> Tensor:
    """float64 [L, D/2] of the tokens at all combinations of the places in time, rows and columns."""
    found = []
    for axis, (where, channels) in enumerate(zip(places, axes, strict=True)):
        frequency = THETA ** -(torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels)
        at = torch.tensor(list(where), dtype=torch.float64, device=device)
        angle = torch.outer(at, frequency)
        shape = [1, 1, 1, -1]
        shape[axis] = len(at)
        found.append(angle.view(shape).expand(*(len(one) for one in places), -1))
    return torch.cat(found, -1).flatten(0, 2)
