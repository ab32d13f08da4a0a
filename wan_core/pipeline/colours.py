"""Colours of the clips of a long video: how they drift, and their match to the first.

What drifts from clip to clip is light and tint: the mean and the deviation of the channels of CIELAB, in which light
and colour are apart. Those of a later clip are made those of the first, in its finished pictures; a clip that begins
with pictures of the one before gets the matched ones. On latents it was no help on the embedded model (docs/log.md).

Legend: F/H/W video frames, height, width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wan_core.execution.report import Report

TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)  # D65
Frames = NDArray[np.uint8]
Change = Callable[[Tensor], Tensor]
"""Pictures [..., 3] in 0..1 -> pictures in 0..1."""


def statistics(frames: Frames, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation [3] of the CIELAB channels of frames [F, H, W, 3], one frame at a time, float64."""
    total, squares = torch.zeros(2, 3, dtype=torch.float64, device=device)
    for frame in frames:
        colours = lab(unit(frame, device)).flatten(0, 1).double()
        total, squares = total + colours.sum(0), squares + colours.square().sum(0)
    count = frames[..., 0].size
    mean = total / count
    return mean, (squares / count - mean.square()).clamp(min=0).sqrt()


def unit(pixels: Frames, device: torch.device) -> Tensor:
    return torch.from_numpy(pixels).to(device).float() / 255


class ColourMatch:
    """The parts of one video, each matched to the first by so much (0 to 1)."""

    def __init__(self, strength: float, device: torch.device) -> None:
        self.strength, self.device = strength, device
        self.first: tuple[Tensor, Tensor] | None = None

    def change(self, part: Frames) -> Change | None:
        """What makes the colours of a part [F, H, W, 3] those of the first; None: nothing is to be changed."""
        if not self.strength or not len(part):
            return None
        own = statistics(part, self.device)
        if self.first is None:
            self.first = own
            return None
        (mean, deviation), (wanted, spread) = own, self.first
        scale, strength = spread / deviation.clamp(min=1e-3), self.strength

        def matched(pictures: Tensor) -> Tensor:
            colours = lab(pictures)
            moved = ((colours.double() - mean) * scale + wanted).to(colours)
            return rgb_of(torch.lerp(colours, moved, strength))

        return matched


def pixels_of(picture: Tensor) -> Frames:
    """0..1 -> uint8."""
    return (picture * 255).round_().clamp_(0, 255).to(torch.uint8).cpu().numpy()


def channel_means(frames: Frames) -> dict[str, Any]:
    """What a report says of the frames of a clip [F, H, W, 3]: mean and deviation of red, green and blue."""
    channels = frames.reshape(-1, 3)
    both = {"means": channels.mean(0), "deviations": channels.std(0)}
    return {name: [round(float(one), 2) for one in many] for name, many in both.items()}


def note_drift(report: Report) -> None:
    """Say how far the channel means of later clips are from those of the first."""
    if len(report.clips) < 2:
        return
    first = report.clips[0]["means"]
    changes = [max(abs(a - b) for a, b in zip(one["means"], first, strict=True)) for one in report.clips]
    worst = max(range(len(changes)), key=changes.__getitem__)
    report.notes.append(
        f"colours: a channel's mean is at most {changes[worst]:.1f} of 255 from that of the first clip (clip "
        f"{worst + 1}), and {changes[-1]:.1f} in the last"
    )


def lab(rgb: Tensor) -> Tensor:
    """sRGB 0..1 [..., 3] -> CIELAB under the white of screens, where equal distances look about equally different."""
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055).clamp(min=0) ** 2.4)
    xyz = linear @ rgb.new_tensor(TO_XYZ).T / rgb.new_tensor(WHITE)
    f = torch.where(xyz > 216 / 24389, xyz.clamp(min=1e-6) ** (1 / 3), (24389 / 27 * xyz + 16) / 116)
    x, y, z = f.unbind(-1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=-1)


def rgb_of(colours: Tensor) -> Tensor:
    """The inverse of `lab`, with colours that no screen shows cut to 0..1."""
    light, a, b = colours.unbind(-1)
    y = (light + 16) / 116
    f = torch.stack([y + a / 500, y, y - b / 200], dim=-1)
    xyz = torch.where(f > 6 / 29, f.clamp(min=0) ** 3, (116 * f - 16) * 27 / 24389) * colours.new_tensor(WHITE)
    linear = (xyz @ torch.linalg.inv(colours.new_tensor(TO_XYZ)).T).clamp(0, 1)
    return torch.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear.clamp(min=1e-8) ** (1 / 2.4) - 0.055)
