"""LoRAs added to a weight that a file stores in 8 bits: the sum is rounded to 8 bits again.

With a new scale all numbers would be rounded again, also those that do not change: as much as when the file was made.
So the scale is kept. But then a change smaller than half a step is rounded away: of a LoRA a hundredth as large as the
weight two fifths would be left in FP8 (E4M3) and four fifths in INT8, of one a third of that an eighth and nothing.
Measured: docs/precision.md.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wan_core.ops.kernels import fused
from wan_core.ops.kernels.formats import FP8, FP8_MAX

TRIES = 2  # after the first
ROWS = 1024  # of a matrix at once: numbers in float32 take four times as much memory
PLASTIC = 1.324717957244746  # its powers give places that are spread evenly in two dimensions (Roberts' R2 sequence)


def change_fp8(data: Tensor, scale: Tensor, total: Tensor) -> dict[str, Tensor]:
    """`weight` and `weight_scale` of `total`, float32 [N, K]. data [N, K] with scale, of one number or one for each
    row: the weight before it changed.

    The change of each row is made larger before it is rounded, until what is left of it, its product with the change,
    is as large as it was.
    """
    before = scale.float().clamp(min=1e-30)
    most = total.abs().amax(1, keepdim=True) / before.reshape(-1, 1)
    most = (most.amax() if before.numel() == 1 else most).reshape(before.shape)
    # By a power of two numbers stay numbers of FP8, but for the smallest. 464 is the last that is rounded to 448.
    grown = before * torch.exp2((most / (FP8_MAX + 16)).log2().ceil().clamp(min=0))
    old, new = (each.reshape(-1, 1).expand(len(data), 1) for each in (before, grown))
    return {"weight": with_change(data, old / new, total, new), "weight_scale": grown}


def with_change(data: Tensor, ratio: Tensor, total: Tensor, scale: Tensor) -> Tensor:
    """`total`, float32 [N, K], over `scale` in FP8; of its change from data [N, K] times `ratio` as much is left in
    each row as there was. ratio, scale: float32 [N, 1]."""
    if fused.writes_fp8(data):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.with_change(data.contiguous(), ratio, total.contiguous(), scale, TRIES)
    made = torch.empty_like(data)
    for rows in parts(len(data)):
        made[rows] = _with_change(data[rows].float() * ratio[rows], total[rows] / scale[rows])
    return made


def parts(rows: int) -> Iterator[slice]:
    return map(slice, range(0, rows, ROWS), range(ROWS, rows + ROWS, ROWS))


def _with_change(before: Tensor, total: Tensor) -> Tensor:
    change = total - before
    size = change.square().sum(1, keepdim=True).clamp(min=1e-30)
    base = (before * change).sum(1, keepdim=True)
    larger = torch.ones_like(size)
    made = _rounded(before, change, larger)
    for _ in range(TRIES):
        left = (made.float().mul_(change).sum(1, keepdim=True) - base) / size
        larger /= left.clamp(1 / 16, 16).sqrt()
        made = _rounded(before, change, larger)
    return made


def _rounded(before: Tensor, change: Tensor, larger: Tensor) -> Tensor:
    """before [N, K] with change [N, K] times larger [N, 1], in FP8."""
    return torch.addcmul(before, change, larger).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def change_int8(data: Tensor, scale: Tensor, total: Tensor) -> dict[str, Tensor]:
    """The same for INT8 with a scale for each row [N, 1]; `total` is rotated as `data` is.

    Steps are equal here, and a change below half a step leaves nothing that could be made larger. Where the mean change
    of a row is so small, numbers are rounded up as often as they are near to the next one.
    """
    most = total.abs().amax(1, keepdim=True)
    grown = torch.where(most / scale > 128, most / 127, scale)  # the largest may lose one step
    places = (torch.arange(count, device=data.device, dtype=torch.float64) for count in data.shape)
    row, column = (place / PLASTIC**power for place, power in zip(places, (1, 2), strict=True))
    made = torch.empty_like(data)
    for rows in parts(len(data)):
        numbers = total[rows] / grown[rows]
        change = numbers - data[rows] * (scale[rows] / grown[rows])
        small = change.square_().mean(1, keepdim=True) < 0.25
        # What does not change is off by float32's rounding: a little less than half a step.
        spread = ((row[rows, None] + column) % 1 - 0.5).float().mul_(0.999).mul_(small)
        made[rows] = numbers.add_(spread).round_().clamp_(-127, 127)
    return {"weight": made, "weight_scale": grown}
