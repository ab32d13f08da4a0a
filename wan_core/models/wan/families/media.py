"""Videos and pictures that drive a family, as pixels: read from files, fitted into the size of the video, cut into
clips.

Legend: F/H/W video frames, height, width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from wan_core.media.fit import Box, Pixels, fit_with_bars
from wan_core.media.video import fit_image, load_image, read_frames, video_facts
from wan_core.models.wan.families.clips import Clip

WHITE = 255
PICTURES = ("reference",)  # fields of the request that are one frame in every clip
Fit = Callable[[Pixels], Pixels]


@dataclass(frozen=True)
class Media:
    """What drives a video.

    pixels: by field of the request, uint8 [F, H, W, 3], F 1 for pictures. crop: what of a frame is shown. frames_of(
    clip, length): which frames of a driving video of `length` frames drive a clip; where they are fewer than those of
    the clip, black ones follow. more: what else drives it, by name, made for a clip.
    """

    pixels: Mapping[str, Pixels]
    crop: Box
    frames_of: Callable[[Clip, int], list[int]]
    more: Mapping[str, Callable[[Clip], Tensor]] = field(default_factory=dict)

    def of(self, clip: Clip) -> dict[str, Tensor]:
        """What drives a clip: pixels [1, 3, F, H, W] in -1..1, float32, and what `more` makes."""
        fitted = {
            name: as_video(pixels if name in PICTURES else self.frames(pixels, clip))
            for name, pixels in self.pixels.items()
        }
        return fitted | {name: make(clip) for name, make in self.more.items()}

    def frames(self, pixels: Pixels, clip: Clip) -> Pixels:
        chosen = pixels[self.frames_of(clip, len(pixels))]
        return np.concatenate([chosen, np.zeros((clip.frames - len(chosen), *pixels.shape[1:]), np.uint8)])


def as_video(pixels: NDArray[np.uint8]) -> Tensor:
    """uint8 [F, H, W, 3] -> [1, 3, F, H, W] in -1..1."""
    return torch.from_numpy(pixels).permute(3, 0, 1, 2)[None] / 127.5 - 1


def keyframes_of(media: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The keyframes of a clip, by their place in it: each [1, 3, 1, H, W] in -1..1. media: `keyframes` is all of them,
    `keyframes_at` their places."""
    if "keyframes" not in media:
        return {}
    places = [int(place) for place in media["keyframes_at"]]
    return dict(zip(places, media["keyframes"].split(1, dim=2), strict=True))


def pixels_to_video(pixels: Tensor) -> Tensor:
    """Pictures [F, H, W, 3] in 0..1, as on ComfyUI's IMAGE socket -> a video [1, 3, F, H, W] in -1..1."""
    return (pixels.float() * 2 - 1).permute(3, 0, 1, 2)[None]


def video_to_pixels(video: Tensor) -> Tensor:
    """The inverse of `pixels_to_video`."""
    return (video[0].permute(1, 2, 3, 0) + 1) / 2


# ----------------------------------------------------------------------------------------------------------- from files


def size_of_area(picture: tuple[int, int], area: int, multiple: int) -> tuple[int, int]:
    """(width, height) of about `area` pixels with the aspect of a picture, rounded down. Source: LightX2V."""
    height = sqrt(area / (picture[0] / picture[1]))
    width = area / height
    return max(multiple, int(width // multiple) * multiple), max(multiple, int(height // multiple) * multiple)


def read_picture(path: str) -> Pixels:
    """uint8 [H, W, 3]."""
    return np.rint(load_image(path) * 255).astype(np.uint8)


def read_fitted(path: str, fps: float, frames: int, size: tuple[int, int], fit: Fit) -> Pixels:
    """At most so many frames of a video at `fps`, each fitted to `size` (width, height): uint8 [F, H, W, 3]."""
    chosen = video_facts(path).frames_at(fps)[:frames]
    fitted = np.empty((len(chosen), size[1], size[0], 3), np.uint8)
    for place, frame in enumerate(read_frames(path, chosen)):
        fitted[place] = fit(frame)
    return fitted


def fit_reference(picture: Pixels, size: tuple[int, int]) -> Pixels:
    """A reference picture of VACE or Fun [H, W, 3], fitted into `size` with white bars."""
    return fit_with_bars(picture, size, by_area=True, bars=WHITE)


# --------------------------------------------------------------------------------------------------- from IMAGE sockets


def fitted_images(images: Tensor, size: tuple[int, int], frames: int, chosen: Sequence[int], fit: Fit) -> Tensor:
    """The chosen ones of pictures [F, H, W, 3] in 0..1, as on ComfyUI's IMAGE socket, or of a MASK [F, H, W], fitted to
    `size`, then black ones up to `frames`: [1, 3, frames, H, W] in -1..1."""
    images = (images[..., None].expand(-1, -1, -1, 3) if images.ndim == 3 else images[..., :3]).cpu().float()
    if tuple(images.shape[2:0:-1]) == size:
        video = pixels_to_video(images[chosen])
    else:
        whole = (images.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
        fitted = [fit(whole[index]) for index in chosen]
        video = as_video(np.stack(fitted) if fitted else np.empty((0, size[1], size[0], 3), np.uint8))
    return F.pad(video, (0, 0, 0, 0, 0, frames - len(chosen)), value=-1)


def images_covering(images: Tensor, size: tuple[int, int], frames: int, missing: float) -> Tensor:
    """Pictures [F, H, W, 3] in 0..1, or a MASK [F, H, W], scaled to cover `size` (width, height) and cropped: [1, 3,
    frames, H, W] in -1..1. missing: the value of frames that are missing."""
    images = (images[..., None].expand(-1, -1, -1, 3) if images.ndim == 3 else images[..., :3])[:frames].cpu().float()
    fitted = torch.stack([torch.from_numpy(fit_image(one, size)) for one in images.numpy()])
    return F.pad(pixels_to_video(fitted), (0, 0, 0, 0, 0, frames - len(fitted)), value=missing)


def references_of(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures [N, H, W, 3] in 0..1 -> [N, 3, 1, H, W] in -1..1, each fitted into `size` with white bars."""
    whole = (images[..., :3].cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return as_video(np.stack([fit_reference(one, size) for one in whole]))[0].transpose(0, 1)[:, :, None]
