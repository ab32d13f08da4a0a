"""How far videos are from those of the full run, and the settings that nothing else beats.

Frames are uint8 [F, H, W, 3]. `perceptual` is LPIPS where its library and weights are installed (`pip install lpips`),
else GMSD, a measure without weights: the deviation of gradient-magnitude similarity over a frame, 0 for equal ones, 0.1
clearly visible (Xue et al., "Gradient Magnitude Similarity Deviation", 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.media.metrics import judge, psnr, ssim, temporal_flicker, unit_range
from wan_core.media.shapes import parse_caption

MOST_PSNR = 99.0  # dB that equal videos count as, so that a mean exists
Distance = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Comparison:
    """One video against that of the full run. `flicker`: of this video, less that of the full run. `truth`: whether the
    caption came true; None where it is outside of the embedded model's world."""

    psnr: float
    ssim: float
    perceptual: float
    flicker: float
    truth: bool | None


def compare(frames: Tensor, full: Tensor, caption: str, perceptual: Distance) -> Comparison:
    return Comparison(
        psnr=min(MOST_PSNR, psnr(frames, full)),
        ssim=ssim(frames, full),
        perceptual=perceptual(frames, full),
        flicker=flicker(frames) - flicker(full),
        truth=truth(frames, caption),
    )


def flicker(frames: Tensor) -> float:
    """0 for pictures and clips of two frames, which have none."""
    return temporal_flicker(frames) if len(frames) > 2 else 0.0


def truth(frames: Tensor, caption: str) -> bool | None:
    try:
        scene = parse_caption(caption)
    except ValueError:
        return None
    return judge(frames, scene).all_true


def summary(found: Sequence[Comparison]) -> dict[str, Any]:
    """Means over videos, the worst PSNR, and the share of captions that came true."""
    told = [c.truth for c in found if c.truth is not None]
    return {
        "psnr": round(_mean([c.psnr for c in found]), 2),
        "psnr_worst": round(min(c.psnr for c in found), 2),
        "ssim": round(_mean([c.ssim for c in found]), 4),
        "perceptual": round(_mean([c.perceptual for c in found]), 4),
        "flicker": round(_mean([c.flicker for c in found]), 5),
        **({"truth": round(_mean(list(map(float, told))), 4)} if told else {}),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names whose point (saved, quality) no other is better than in both, or in one and equal in the other; in
    order of what they save."""

    def beaten(name: str) -> bool:
        x, y = points[name]
        return any(a >= x and b >= y and (a, b) != (x, y) for a, b in points.values())

    return sorted((name for name in points if not beaten(name)), key=lambda name: points[name])


# ---------------------------------------------------------------------------------------------------------- perceptual


def find_perceptual() -> tuple[str, Distance]:
    """("lpips", ...) or ("gmsd", ...)."""
    try:
        import lpips  # pyright: ignore[reportMissingImports]

        network = lpips.LPIPS(net="alex", verbose=False)
    except (ImportError, OSError, RuntimeError):  # not installed, or its weights cannot be fetched
        return "gmsd", gmsd

    def distance(a: Tensor, b: Tensor) -> float:
        with torch.no_grad():
            pair = [unit_range(v).permute(0, 3, 1, 2) * 2 - 1 for v in (a, b)]
            return float(network(*pair).mean())

    return "lpips", distance


def gmsd(a: Tensor, b: Tensor) -> float:
    """The mean over frames of two videos [F, H, W, 3]: on luminance at half size, as published (c = 170 of 255^2)."""
    first, second = _gradient(a), _gradient(b)
    c = 170 / 255**2
    similarity = (2 * first * second + c) / (first.square() + second.square() + c)
    return float(similarity.flatten(1).std(dim=1, correction=0).mean())


def _gradient(frames: Tensor) -> Tensor:
    """Magnitude of the Prewitt gradient of luminance: [F, 1, H / 2, W / 2]."""
    grey = unit_range(frames) @ torch.tensor([0.299, 0.587, 0.114], device=frames.device)
    half = F.avg_pool2d(grey[:, None], 2)
    across = half.new_tensor([[1.0, 0.0, -1.0]] * 3) / 3
    kernels = torch.stack([across, across.T])[:, None]  # [2, 1, 3, 3]
    return F.conv2d(half, kernels, padding=1).square().sum(1, keepdim=True).sqrt()
