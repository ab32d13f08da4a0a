"""Rotary position embedding over time, rows and columns.

Legend: B batch, L tokens (= T * Y * X), H heads, D head dim, T/Y/X token frames, rows, columns.

A head's D channels are D/2 interleaved pairs, each rotated as a complex number. The first pairs turn with the frame,
the next with the row, the last with the column (22/21/21 pairs at D = 128). Source: Wan2.2/wan/modules/model.py,
rope_params, rope_apply.
"""

from __future__ import annotations

import torch
from torch import Tensor

THETA = 10000.0


def rope_table(
    grid: tuple[int, int, int],
    axes: tuple[int, int, int],
    device: torch.device | str = "cpu",
    start: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """The rotation of every token of `grid` (T, Y, X): float32 [L, 1, D/2, 2] holding (cos, sin). start: the position
    of the first token.

    Computed in float64 on the device itself and rounded once: at 1,000 positions float32 angles would already be off in
    the fourth digit.
    """
    T, Y, X = grid
    angles = []
    for positions, channels, first in zip((T, Y, X), axes, start, strict=True):
        frequency = THETA ** -(torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels)
        places = first + torch.arange(positions, dtype=torch.float64, device=device)
        angles.append(torch.outer(places, frequency))
    t, y, x = angles
    angle = torch.cat(
        [
            t[:, None, None].expand(T, Y, X, -1),
            y[None, :, None].expand(T, Y, X, -1),
            x[None, None, :].expand(T, Y, X, -1),
        ],
        dim=-1,
    ).reshape(T * Y * X, 1, -1)
    return torch.stack([angle.cos(), angle.sin()], dim=-1).float()
