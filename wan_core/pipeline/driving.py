"""Videos, pictures and sounds that drive a family: their sizes before anything is loaded, and what of them drives a
clip.

Legend: F/H/W video frames, height, width, A frames of features of a sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from wan_core.config import OptionError, Request
from wan_core.config.limits import MAX_DRIVING
from wan_core.media.fit import Box, Pixels, fit_covering, fit_with_bars, fitted_box
from wan_core.media.sound import read_sound
from wan_core.media.video import load_image, picture_size, read_video, video_facts
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import check_begins, family_of
from wan_core.models.wan.families.clips import Clip, MediaRules, bounced
from wan_core.models.wan.families.family import Inputs
from wan_core.models.wan.tasks import Task
from wan_core.pipeline.images import pixels_to_video

PICTURES = ("reference",)
VIDEOS = ("pose_video", "face_video", "background", "mask")
MEDIA = (*PICTURES, *VIDEOS, "control_video", "audio")
OTHERS = ("outpaint", "camera")  # what drives a video, and is no file
BEGINS = ("image", "last_image", "from_video", "denoise")  # what a video begins with
LEAST_SECONDS = 0.1  # of a sound
STRENGTHS = ("pose_strength", "reference_strength")
SETTINGS = ("pose_prompt", *STRENGTHS, "face_guidance")


class DrivenSize(NamedTuple):
    """Of a video as its media have it."""

    width: int
    height: int
    frames: int
    fps: int


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def check_media(request: Request, task: Task) -> None:
    """Raise OptionError for media that the task does not take, and where some are missing."""
    rules = family_of(task).media
    given = [field for field in (*MEDIA, *OTHERS, *SETTINGS) if getattr(request, field) is not None]
    takes = () if rules is None else (*rules.needs, *rules.takes, *rules.settings)
    if unknown := [option(field) for field in given if field not in takes]:
        raise OptionError(f"{task.name} does not take {', '.join(unknown)}: leave it out, or load a model that does")
    if rules is None and task.driven_by:
        raise OptionError(
            f"{task.name} is driven by videos that the command line and WanCore's own nodes do not take yet: use "
            f"ComfyUI's {task.driven_by} with WanCore Sampler"
        )
    if rules is None:
        return
    if missing := [option(field) for field in rules.needs if field not in given]:
        names = " and ".join(field.replace("_", " ") for field in rules.needs)
        raise OptionError(f"{task.name} makes a video of a {names}: give {' and '.join(missing)}")
    if rules.together and len({field in given for field in rules.together}) > 1:
        raise OptionError(f"only one of {' and '.join(map(option, rules.together))} given: give both, or neither")
    check_begins(task, [field for field in BEGINS if getattr(request, field) is not None])


def with_settings(request: Request, inputs: Inputs, pose_context: Tensor | None) -> Inputs:
    """The fields of `Conditioning` with what the request says beside media. pose_context: text rows for the driving
    video, for a family that reads some."""
    own: dict[str, Any] = {name: getattr(request, name) for name in STRENGTHS if getattr(request, name) is not None}
    if pose_context is not None:
        own["pose_context"] = pose_context
    without = dict(inputs.get("uncond_inputs", {}))
    if request.face_guidance is False:
        without.pop("face", None)
    return {**inputs, "inputs": {**inputs.get("inputs", {}), **own}, "uncond_inputs": without}


def driven_size(request: Request, task: Task, rules: MediaRules, multiple: int) -> DrivenSize:
    """What the video is where the request leaves it open. Raises OptionError for media that cannot be read."""
    assert request.reference is not None
    picture = picture_size(request.reference)
    for field in VIDEOS:
        if (path := getattr(request, field)) is not None:
            video_facts(path)
    fps, most = (heard_length if rules.length_of == "audio" else followed_length)(request, task, rules)
    if request.frames is not None and request.frames > most:
        path = getattr(request, rules.length_of)
        raise OptionError(f"{path} has {most} frames, and {request.frames} are asked for: use fewer")
    frames = most if request.frames is None else request.frames
    if request.width is not None and request.height is not None:
        width, height = request.width, request.height
    elif rules.size_of == "pose_video":
        assert request.pose_video is not None
        width, height = (max(multiple, side // multiple * multiple) for side in video_facts(request.pose_video)[:2])
    else:
        width, height = size_of_area(picture, task.width * task.height, lcm(multiple, rules.step))
    if min(width, height) < rules.least:
        raise OptionError(f"{width}x{height} given; {task.name} needs {rules.least} pixels and more in each direction")
    return DrivenSize(width, height, frames, fps)


def followed_length(request: Request, task: Task, rules: MediaRules) -> tuple[int, int]:
    """Frames per second and frames of a video that follows the pose video to its end."""
    assert request.pose_video is not None
    fps = task.fps if rules.resampled else min(240, max(1, round(video_facts(request.pose_video).fps)))
    fps = fps if request.fps is None else request.fps
    return fps, len(frame_indices(request.pose_video, fps if rules.resampled else None))


def heard_length(request: Request, task: Task, rules: MediaRules) -> tuple[int, int]:
    """Frames per second and frames of a video that has all of its sound. Raises OptionError."""
    assert request.audio is not None
    sound = read_sound(request.audio)
    if request.fps not in (None, task.fps):
        raise OptionError(f"{request.fps} frames per second given; {task.name} makes {task.fps}: leave --fps out")

    if sound.seconds < LEAST_SECONDS:
        raise OptionError(f"{request.audio} has {sound.seconds:.3f} seconds of sound, and {LEAST_SECONDS} are needed")
    return task.fps, -(-sound.samples.shape[1] * task.fps // sound.rate)


def size_of_area(picture: tuple[int, int], area: int, multiple: int) -> tuple[int, int]:
    """(width, height) of about `area` pixels with the aspect of a picture, rounded down. Source: LightX2V."""
    height = sqrt(area / (picture[0] / picture[1]))
    width = area / height
    return max(multiple, int(width // multiple) * multiple), max(multiple, int(height // multiple) * multiple)


def frame_indices(path: str, fps: int | None) -> NDArray[np.int64]:
    """Which frames of a video are read: the nearest at `fps` frames per second, or for None all."""
    facts = video_facts(path)
    if fps is None:
        return np.arange(facts.frames)
    times = np.arange(max(1, int(facts.frames / facts.fps * fps))) / fps
    return np.round(times * facts.fps).astype(np.int64).clip(0, facts.frames - 1)


@dataclass(frozen=True)
class Media:
    """Fitted pixels by field of the request: uint8 [F, H, W, 3], F 1 for pictures. crop: what of a frame is shown.
    audio: features of the sound [1, W, C, A], where the family hears one. camera: the rays of a clip, where it has a
    camera."""

    pixels: Mapping[str, NDArray[np.uint8]]
    crop: Box
    rules: MediaRules
    audio: Tensor | None = None
    camera: Callable[[Clip], Tensor] | None = None

    def of(self, clip: Clip) -> dict[str, Tensor]:
        """Of the frames of a clip: pixels [1, 3, F, H, W] in -1..1, float32, and `audio`, its features of the sound."""
        heard = {} if self.audio is None else {"audio": self.audio[..., clip.first : clip.last]}
        seen = {
            field: as_video(pixels if field in PICTURES else self.frames(pixels, clip))
            for field, pixels in self.pixels.items()
        }
        return seen | heard | ({} if self.camera is None else {"camera": self.camera(clip)})

    def frames(self, pixels: Pixels, clip: Clip) -> Pixels:
        """Those of a driving video for a clip."""
        found = pixels[_places(clip, len(pixels), self.rules)]
        return np.concatenate([found, np.zeros((clip.frames - len(found), *pixels.shape[1:]), np.uint8)])


def _places(clip: Clip, length: int, rules: MediaRules) -> list[int]:
    """Which frames of a driving video are those of a clip; where the rest is black, fewer than the clip has."""
    if rules.past_end == "black":
        return list(range(clip.first, min(clip.last, length)))
    return [bounced(index, length) for index in range(clip.first, clip.last)]


def fitted(pixels: Pixels, size: tuple[int, int], rules: MediaRules) -> Pixels:
    return fit_covering(pixels, size) if rules.covering else fit_with_bars(pixels, size, by_area=rules.by_area)


def as_video(pixels: NDArray[np.uint8]) -> Tensor:
    """uint8 [F, H, W, 3] -> [1, 3, F, H, W] in -1..1."""
    return torch.from_numpy(pixels).permute(3, 0, 1, 2)[None] / 127.5 - 1


def load_media(
    request: Request, task: Task, dit: DiTConfig, size: tuple[int, int], fps: int, frames: int
) -> Media | None:
    """The media of `request`, fitted to `size` (width, height); None where the family has none. frames: at most so
    many of a video. Raises OptionError."""
    rules = family_of(task).media
    if rules is None:
        return None
    assert request.reference is not None
    picture = np.rint(load_image(request.reference) * 255).astype(np.uint8)
    found = {"reference": fitted(picture, size, rules)[None]}
    for field in VIDEOS:
        path = getattr(request, field)
        if path is None:
            continue
        side = getattr(dit, "face_size", None) if field == "face_video" else None
        chosen = frame_indices(path, fps if rules.resampled else None)[:frames]
        video = read_video(path, max_frames=int(chosen.max()) + 1, max_pixels=MAX_DRIVING)
        wanted = size if side is None else (side, side)
        frames_of = np.empty((len(chosen), wanted[1], wanted[0], 3), np.uint8)
        for place, index in enumerate(chosen):
            frames_of[place] = fitted(video[index], wanted, rules)
        found[field] = frames_of
    crop = shown(picture_size(request.reference), size) if rules.cropped else Box(0, 0, *size)
    return Media(found, crop, rules)


def images_of(images: Tensor, size: tuple[int, int], clip: Clip, rules: MediaRules) -> Tensor:
    """As `Media.of`, of pictures [F, H, W, 3] in 0..1, as on ComfyUI's IMAGE socket, or a MASK [F, H, W]."""
    images = (images[..., None].expand(-1, -1, -1, 3) if images.ndim == 3 else images[..., :3]).cpu().float()
    places = _places(clip, len(images), rules)
    if tuple(images.shape[2:0:-1]) == size:
        found = pixels_to_video(images[places])
    else:
        whole = (images.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
        frames = [fitted(whole[place], size, rules) for place in places]
        found = as_video(np.stack(frames) if frames else np.empty((0, size[1], size[0], 3), np.uint8))
    return F.pad(found, (0, 0, 0, 0, 0, clip.frames - len(places)), value=-1)


def shown(picture: tuple[int, int], size: tuple[int, int]) -> Box:
    """Where a fitted picture is, both sides even, as H.264 needs them."""
    left, top, width, height = fitted_box(picture, size)
    return Box(left, top, max(2, width // 2 * 2), max(2, height // 2 * 2))
