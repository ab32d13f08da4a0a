"""Distances of videos from those of the full run, and the Pareto front of settings.

Frames are uint8 [F, H, W, 3]. `perceptual` is LPIPS if its library and weights are installed (`pip install lpips`),
else GMSD, which needs no weights: the deviation of gradient-magnitude similarity over a frame, 0 for equal frames, 0.1
clearly visible (Xue et al., "Gradient Magnitude Similarity Deviation", 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.pipeline.embedded import parse_caption
from wan_lab.driving import follows
from wan_lab.metrics import judge, psnr, ssim, temporal_flicker, unit_range

# Numbers of a video that is compared on the device of the models: a larger one's copies would not fit beside them.
SMALL_VIDEO = 2**25
MOST_PSNR = 99.0  # dB for equal videos, whose PSNR is infinite, so that a mean exists
Distance = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Comparison:
    """One video compared with the full run's. `flicker`: difference to the full run's. `truth`: whether the video shows
    its caption; None if the caption is not one of the embedded model's. `look`, `motion`: of a driven video, whether it
    shows the colour, shape and background of its caption, and follows the driving one; None of others."""

    psnr: float
    ssim: float
    perceptual: float
    flicker: float
    truth: bool | None
    look: bool | None = None
    motion: bool | None = None


def compare(
    frames: Tensor,
    full: Tensor,
    caption: str,
    perceptual: Distance,
    driving: Tensor | None = None,
    device: torch.device | None = None,
    judged: Callable[[Tensor, str], bool | None] | None = None,
) -> Comparison:
    """driving: the video [F, H, W, 3] that drove `frames`. device: where small videos are compared, if not where they
    are. judged: whether a video shows its caption, in place of `truth`."""
    target = frames.device if device is None or frames.numel() > SMALL_VIDEO else device
    shown, exact = frames.to(target), full.to(target)
    return Comparison(
        psnr=min(MOST_PSNR, psnr(shown, exact)),
        ssim=ssim(shown, exact),
        perceptual=perceptual(shown, exact),
        flicker=flicker(shown) - flicker(exact),
        truth=(judged or truth)(frames, caption),
        look=None if driving is None else shows_look(frames, caption),
        motion=None if driving is None else follows(frames, driving),
    )


def flicker(frames: Tensor) -> float:
    """Temporal flicker; 0 for clips of fewer than three frames."""
    return temporal_flicker(frames) if len(frames) > 2 else 0.0


def truth(frames: Tensor, caption: str) -> bool | None:
    try:
        scene = parse_caption(caption)
    except ValueError:
        return None
    return judge(frames, scene).all_true


def shows_look(frames: Tensor, caption: str) -> bool:
    """Whether the colour, shape and background are those of the caption."""
    seen = judge(frames, caption)
    return seen.background and seen.colour and seen.shape


def summary(videos: Sequence[Comparison]) -> dict[str, Any]:
    """Means over videos, the worst PSNR, the share of videos of which a claim is true, and standard errors (`_se`)."""
    claims = {name: [getattr(c, name) for c in videos] for name in ("truth", "look", "motion")}
    answered = {name: [float(value) for value in values if value is not None] for name, values in claims.items()}
    return {
        "psnr": round(fmean([c.psnr for c in videos]), 2),
        "psnr_worst": round(min(c.psnr for c in videos), 2),
        "ssim": round(fmean([c.ssim for c in videos]), 4),
        "perceptual": round(fmean([c.perceptual for c in videos]), 4),
        "flicker": round(fmean([c.flicker for c in videos]), 5),
        **{name: round(fmean(values), 4) for name, values in answered.items() if values},
        **{f"{name}_se": round(standard_error([getattr(c, name) for c in videos]), 4) for name in ("psnr", "ssim")},
        **{f"{name}_se": round(standard_error(values), 4) for name, values in answered.items() if values},
    }


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of independent values; 0 for one."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names on the Pareto front of points (saved, quality), ordered by the share saved."""

    def dominated(name: str) -> bool:
        x, y = points[name]
        return any(a >= x and b >= y and (a, b) != (x, y) for a, b in points.values())

    return sorted((name for name in points if not dominated(name)), key=lambda name: points[name])


# ---------------------------------------------------------------------------------------------------------- perceptual


def find_perceptual() -> tuple[str, Distance]:
    """(name, distance): "lpips" if it is installed with its weights, else "gmsd"."""
    try:
        import lpips  # pyright: ignore[reportMissingImports]

        network = lpips.LPIPS(net="alex", verbose=False)
    except (ImportError, OSError, RuntimeError):  # not installed, or its weights cannot be downloaded
        return "gmsd", gmsd

    def distance(a: Tensor, b: Tensor) -> float:
        with torch.no_grad():
            pair = [unit_range(v).permute(0, 3, 1, 2) * 2 - 1 for v in (a, b)]
            return float(network.to(a.device)(*pair).mean())

    return "lpips", distance


def gmsd(a: Tensor, b: Tensor) -> float:
    """GMSD of two videos [F, H, W, 3], mean over frames: on luminance at half size, as published (c = 170 / 255^2)."""
    first, second = _gradient(a), _gradient(b)
    c = 170 / 255**2
    similarity = (2 * first * second + c) / (first.square() + second.square() + c)
    return float(similarity.flatten(1).std(dim=1, correction=0).mean())


def _gradient(frames: Tensor) -> Tensor:
    """Magnitude of the Prewitt gradient of luminance: [F, 1, H / 2, W / 2]."""
    grey = unit_range(frames) @ torch.tensor([0.299, 0.587, 0.114], device=frames.device)
    half = F.avg_pool2d(grey[:, None], 2)
    # Sums instead of a convolution, which a GPU would round to TF32.
    padded = F.pad(half, (1, 1, 1, 1))
    rows = padded[:, :, :-2] + padded[:, :, 1:-1] + padded[:, :, 2:]
    columns = padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]
    across, down = rows[..., :-2] - rows[..., 2:], columns[:, :, :-2] - columns[:, :, 2:]
    return torch.hypot(across, down) / 3
