"""Metrics of videos, from frames alone.

`judge` decides whether a clip of the embedded model (`wan_lab.shapes`) shows its caption, `describe` returns the
scene that it shows. `psnr`, `ssim` and `temporal_flicker` work with any video.

Frames are [F, H, W, 3], uint8 0..255 or floating point 0..1, on any device. Shapes: F frames, H rows, W columns, N
fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.pipeline.colours import lab
from wan_core.pipeline.embedded import COLOURS, MOTIONS, SHAPES, Scene, parse_caption
from wan_lab.shapes import DIRECTIONS, PALETTE, REFERENCE_SIZE, coverage

MIN_CONTRAST = (
    12.0  # CIELAB units between shape and background below which nothing is seen; the palette's nearest pair is 49
)
MIN_OVERLAP = 0.6  # intersection over union of a mask and the best template below which it is no shape at all
STILL_PIXELS, MOVING_PIXELS = 6.0, 12.0  # of a 96-pixel frame: the world moves 20-40
FITTED_FRAMES = 9  # shapes are compared in at most this many frames, evenly spread
BLURRED_AT_ONCE = 2**24  # numbers: taps of the blur times pixels


@dataclass(frozen=True)
class Observation:
    """The result of `describe`; None for a word that it could not determine. `overlap` is the best template's
    intersection over union."""

    background: str
    colour: str | None
    shape: str | None
    motion: str | None
    overlap: float

    @property
    def scene(self) -> Scene | None:
        """The scene, if every word was determined and the shape's colour is not the background's."""
        if self.colour is None or self.shape is None or self.motion is None or self.colour == self.background:
            return None
        return Scene(self.colour, self.shape, self.motion, self.background)


@dataclass(frozen=True)
class Verdict:
    """For each of a caption's four words, whether the video shows it."""

    background: bool
    colour: bool
    shape: bool
    motion: bool

    @property
    def all_true(self) -> bool:
        return self.background and self.colour and self.shape and self.motion


def judge(frames: Tensor, scene: Scene | str) -> Verdict:
    """Whether `frames` [F, H, W, 3] show `scene` (or the scene of a caption). Raises ValueError for a caption outside
    the grammar."""
    wanted = parse_caption(scene) if isinstance(scene, str) else scene
    return verdict(describe(frames), wanted)


def verdict(seen: Observation, wanted: Scene) -> Verdict:
    return Verdict(
        background=seen.background == wanted.background,
        colour=seen.colour == wanted.colour,
        shape=seen.shape == wanted.shape,
        motion=seen.motion == wanted.motion,
    )


@torch.no_grad()
def describe(frames: Tensor) -> Observation:
    """The most likely scene of `frames` [F, H, W, 3].

    The background is the median of the border; a pixel belongs to the shape as far as it lies on the way from the
    background's to the shape's colour; the shape is the template that overlaps best at the mask's own centre and
    size; the motion is the track of the mask's centre.
    """
    scale = min(frames.shape[1:3]) / REFERENCE_SIZE
    border, mask, colour = _seen(frames, scale)
    background = _nearest_colour(border)
    if mask is None:
        return Observation(background, None, None, None, 0.0)
    centre, area = _centre_and_area(mask)
    visible = area > 0.25 * area.median()
    if visible.float().mean() < 0.7 or area.median() < (8 * scale) ** 2:
        return Observation(background, colour, None, None, 0.0)
    shape, overlap = _shape(mask[visible], centre[visible], area[visible], scale)
    return Observation(background, colour, shape, _motion(centre[visible], scale), overlap)


@torch.no_grad()
def track(frames: Tensor) -> Tensor | None:
    """Where the shape of `frames` [F, H, W, 3] is: the centre of its bounding box (x, y) in pixels [F, 2]; None where
    no shape is seen, or not in every frame."""
    scale = min(frames.shape[1:3]) / REFERENCE_SIZE
    _, mask, _ = _seen(frames, scale)
    if mask is None:
        return None
    centre, area = _centre_and_area(mask)
    if area.min() < (8 * scale) ** 2:
        return None
    shape, _ = _shape(mask, centre, area, scale)
    index = 0 if shape is None else SHAPES.index(shape)
    drop = UNIT_CENTROID[index] * (area / UNIT_AREA[index]).sqrt()
    return centre - torch.stack([torch.zeros_like(drop), drop], 1)


def motion_amplitude(frames: Tensor) -> float | None:
    """Pixels of a 96-pixel frame that the shape of `frames` [F, H, W, 3] moves from frame to frame, on average; None:
    no shape is seen in all of them, or there is one frame."""
    way = track(frames)
    if way is None or len(way) < 2:
        return None
    return float((way[1:] - way[:-1]).norm(dim=1).mean()) * REFERENCE_SIZE / min(frames.shape[1:3])


def _seen(frames: Tensor, scale: float) -> tuple[Tensor, Tensor | None, str | None]:
    """Colour of the border [3], and the shape's mask and colour as of `_mask`."""
    video = _blur(unit_range(frames).permute(0, 3, 1, 2), scale)  # [F, 3, H, W]
    border = _border(video, width=max(2, round(2 * scale)))
    return border, *_mask(video, border)


def unit_range(frames: Tensor) -> Tensor:
    """[F, H, W, 3] uint8 or floating point -> float32 0..1."""
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise ValueError(f"frames of shape {tuple(frames.shape)} given: pass one video as [F, H, W, 3]")
    if frames.dtype == torch.uint8:
        return frames.float() / 255
    if not frames.is_floating_point():
        raise ValueError(f"frames of {frames.dtype} given: pass uint8 0..255 or floating point 0..1")
    return frames.float().clamp(0, 1)


# -------------------------------------------------------------------------------------------------------------- colours


def _nearest_colour(rgb: Tensor) -> str:
    palette = rgb.new_tensor(list(PALETTE.values())) / 255
    return COLOURS[int((lab(palette) - lab(rgb)).norm(dim=-1).argmin())]


def _border(video: Tensor, width: int) -> Tensor:
    """Median colour [3] of the outermost `width` pixels of all frames."""
    sides = (video[..., :width, :], video[..., -width:, :], video[..., :width], video[..., -width:])
    return torch.cat([side.transpose(0, 1).flatten(1) for side in sides], dim=1).median(dim=1).values


# ----------------------------------------------------------------------------------------------------------------- mask


def _mask(video: Tensor, border: Tensor) -> tuple[Tensor | None, str | None]:
    """The shape's mask 0..1 [F, H, W] and its colour; (None, None) if no pixels differ from the background."""
    pixels = video.movedim(1, -1)  # [F, H, W, 3]
    distance = (lab(pixels) - lab(border)).norm(dim=-1)
    # The smallest shape covers about 4 % of a frame: of the most different 2 %, the median is well inside it.
    top = distance.flatten().topk(max(1, distance.numel() // 50)).values.median()
    if top < MIN_CONTRAST:
        return None, None
    inside = pixels[distance > 0.8 * top].median(dim=0).values  # [3]
    way = inside - border
    return (((pixels - border) @ way) / way.dot(way)).clamp(0, 1), _nearest_colour(inside)


def _blur(images: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of [..., H, W] against noise and codec blocks; templates are blurred equally."""
    taps = _gaussian(max(1, round(2.5 * sigma)), sigma)
    reach = len(taps) // 2
    flat = images.flatten(0, -3)
    at_once = max(1, BLURRED_AT_ONCE // (len(taps) * flat.shape[-2] * flat.shape[-1]))
    padded = (F.pad(part, (reach, reach, reach, reach), mode="replicate") for part in flat.split(at_once))
    return torch.cat([_separable(part, taps) for part in padded]).view_as(images)


def _gaussian(reach: int, sigma: float) -> list[float]:
    taps = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(-reach, reach + 1)]
    return [tap / sum(taps) for tap in taps]


def _separable(x: Tensor, taps: list[float]) -> Tensor:
    """Convolve rows and columns of [..., H, W] with `taps`, valid pixels only. A sum of slices: several times faster
    on a CPU than conv2d with one channel."""
    for dim in (-2, -1):
        length = x.shape[dim] - len(taps) + 1
        x = torch.stack([x.narrow(dim, i, length) * tap for i, tap in enumerate(taps)]).sum(0)
    return x


def _centre_and_area(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Centre of mass (x, y) [F, 2] and area [F] in pixels of the shape in each frame, without pixels far from its
    centre."""
    solid = (mask > 0.5).float()
    x = torch.arange(mask.shape[2], device=mask.device) + 0.5
    y = torch.arange(mask.shape[1], device=mask.device) + 0.5

    # Medians of the marginal distributions are not drawn away by a stray fragment, as a mean would be.
    median = torch.stack([_median_of(solid.sum(1), x), _median_of(solid.sum(2), y)], dim=1)  # [F, 2]
    reach = (
        1.2 * solid.sum((1, 2)).clamp(min=1).sqrt()[:, None, None]
    )  # a cross reaches 0.65 sqrt(area), others less than 0.8
    near = ((x - median[:, 0, None, None]).abs() <= reach) & ((y[:, None] - median[:, 1, None, None]).abs() <= reach)
    solid = solid * near
    area = solid.sum((1, 2))
    mass = torch.stack([(solid.sum(1) * x).sum(1), (solid.sum(2) * y).sum(1)], dim=1)
    return mass / area.clamp(min=1)[:, None], area


def _median_of(counts: Tensor, positions: Tensor) -> Tensor:
    """Weighted median [F] of `positions` [P] under `counts` [F, P]."""
    cumulative = counts.cumsum(1)
    return positions[(cumulative < cumulative[:, -1:] / 2).sum(1).clamp(max=len(positions) - 1)]


# ----------------------------------------------------------------------------------------------------- shape and motion

UNIT_AREA = (3.14159265, 3.24, 1.7320508, 2.3616)  # of each of SHAPES at radius 1
UNIT_CENTROID = (0.0, 0.0, 0.28867513, 0.0)  # y of the centre of mass below the box's centre at radius 1


def _shape(mask: Tensor, centre: Tensor, area: Tensor, scale: float) -> tuple[str | None, float]:
    """(template with the best mean overlap over frames, or None if its overlap is small; the overlap)."""
    chosen = torch.linspace(0, len(mask) - 1, min(len(mask), FITTED_FRAMES), device=mask.device).round().long()
    mask, centre, area = _steep(mask[chosen]), centre[chosen], area[chosen]
    frames, height, width = mask.shape
    sizes = mask.new_tensor([0.92, 1.0, 1.08])
    index = torch.arange(len(SHAPES), device=mask.device)
    radius = (area[:, None] / mask.new_tensor(UNIT_AREA)).sqrt()[:, :, None] * sizes  # [F, shapes, sizes]
    drop = radius * mask.new_tensor(UNIT_CENTROID)[:, None]
    boxes = torch.stack([centre[:, 0, None, None].expand_as(drop), centre[:, 1, None, None] - drop], dim=-1)
    templates = coverage(
        index[None, :, None].expand_as(radius).reshape(-1),
        boxes.reshape(-1, 2),
        radius.reshape(-1),
        height=height,
        width=width,
    )
    templates = _steep(_blur(templates, scale)).view(frames, -1, height, width)
    mask = mask[:, None]
    overlap = torch.minimum(mask, templates).sum((2, 3)) / torch.maximum(mask, templates).sum((2, 3)).clamp(min=1e-6)
    # Every frame its best size, then the shape that does best over all frames.
    score = overlap.view(frames, len(SHAPES), len(sizes)).amax(2).mean(0)
    best = int(score.argmax())
    return (SHAPES[best] if score[best] >= MIN_OVERLAP else None), float(score[best])


def _steep(mask: Tensor) -> Tensor:
    """Set weak mask values (noise, ringing) to 0 and strong ones to 1."""
    return ((mask - 0.25) / 0.5).clamp(0, 1)


def _motion(centre: Tensor, scale: float) -> str | None:
    """The motion of a track [F, 2]: mainly along one axis, "still", or None if unclear."""
    ends = min(3, len(centre))
    # Median of three against single bad frames. It shortens the distance by two frames, which is corrected below.
    way = centre[-ends:].median(0).values - centre[:ends].median(0).values
    way = way * (len(centre) - 1) / max(1, len(centre) - ends) / scale
    wander = (centre - centre.median(0).values).norm(dim=1).quantile(0.9) / scale
    if wander < STILL_PIXELS and way.norm() < STILL_PIXELS:
        return "still"
    x, y = (float(v) for v in way)
    if max(abs(x), abs(y)) < MOVING_PIXELS or min(abs(x), abs(y)) > 0.5 * max(abs(x), abs(y)):
        return None
    sign = (int(x > 0) * 2 - 1, 0) if abs(x) > abs(y) else (0, int(y > 0) * 2 - 1)
    return MOTIONS[list(DIRECTIONS.values()).index(sign)]


# ------------------------------------------------------------------------------------------------------------ distances


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio of two videos [F, H, W, 3] in dB over all pixels and channels; inf if equal."""
    a, b = _pair(a, b)
    error = (a - b).square().mean()
    return float(-10 * torch.log10(error))


def ssim(a: Tensor, b: Tensor) -> float:
    """Structural similarity of two videos [F, H, W, 3]: 1 if equal.

    Per frame and RGB channel with the usual 11x11 Gaussian window (sigma 1.5), K1 = 0.01, K2 = 0.03, only where the
    window lies inside the frame, then averaged. Source: Wang, Bovik, Sheikh, Simoncelli, "Image quality assessment",
    2004.
    """
    a, b = _pair(a, b)
    if min(a.shape[1:3]) < 11:
        raise ValueError(f"frames of {a.shape[1]}x{a.shape[2]} given: SSIM's window needs 11x11 pixels or more")
    window = _gaussian(5, 1.5)
    total = 0.0
    for x, y in zip(a.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2), strict=True):  # [3, H, W]
        mx, my, xx, yy, xy = _separable(torch.stack([x, y, x * x, y * y, x * y]), window)
        vx, vy, vxy = xx - mx * mx, yy - my * my, xy - mx * my
        c1, c2 = 0.01**2, 0.03**2
        index = (2 * mx * my + c1) * (2 * vxy + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
        total += float(index.mean())
    return total / len(a)


def temporal_flicker(frames: Tensor) -> float:
    """Mean absolute second difference over time of [F, H, W, 3] in 0..1: 0 for stills and steady fades, large for
    flicker.

    ValueError below three frames.
    """
    video = unit_range(frames)
    if len(video) < 3:
        raise ValueError(f"{len(video)} frames given: flicker needs three or more")
    return float((video[2:] - 2 * video[1:-1] + video[:-2]).abs().mean())


def _pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.shape != b.shape:
        raise ValueError(f"videos of {tuple(a.shape)} and {tuple(b.shape)} cannot be compared: give equal shapes")
    return unit_range(a), unit_range(b)
