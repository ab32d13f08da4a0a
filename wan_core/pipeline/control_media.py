"""What controls VACE and Fun: control videos, masks, pictures and paths of a camera. They say what size and length the
video has, where the request leaves that open.

Legend: F/H/W video frames, height, width.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config import OptionError, Request
from wan_core.config.checks import check_picture_size
from wan_core.config.limits import MAX_DRIVING
from wan_core.media.fit import Box, Pixels, fit_covering, fit_with_bars
from wan_core.media.video import fit_image, load_image, picture_size, read_video, video_facts
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.clips import Clip, MediaRules
from wan_core.models.wan.families.fun.camera import camera_rays, pose_count, read_camera
from wan_core.models.wan.tasks import Task
from wan_core.pipeline.driving import DrivenSize, Media, as_video, frame_indices, size_of_area
from wan_core.pipeline.images import pixels_to_video

PICTURE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
GREY, WHITE = 127, 255


def given_size(request: Request, task: Task, rules: MediaRules, multiple: int) -> DrivenSize:
    """What the video is where the request leaves it open: as long as the control video or the poses of the camera, up
    to the task's length, and of the aspect of the control video or else of a known frame. Raises OptionError."""
    check_given(request, task)
    fps = task.fps if request.fps is None else request.fps
    lengths: dict[str, int] = {}
    if request.control_video is not None:
        lengths[request.control_video] = len(frame_indices(request.control_video, fps))
    if request.camera is not None and (count := pose_count(request.camera)) is not None:
        lengths["the camera"] = count
    for name, most in lengths.items():
        if request.frames is not None and request.frames > most:
            raise OptionError(f"{name} has {most} frames, and {request.frames} are asked for: use fewer")
    frames = request.frames
    if frames is None:
        longest = min([*lengths.values()] or [task.frames])
        frames = longest if request.clip_frames else (min(longest, task.frames) - 1) // 4 * 4 + 1
    if request.width is not None and request.height is not None:
        return DrivenSize(request.width, request.height, frames, fps)
    picture = picture_of(request)
    if picture is None:
        return DrivenSize(task.width, task.height, frames, fps)
    return DrivenSize(*size_of_area(picture, task.width * task.height, multiple), frames, fps)


def check_given(request: Request, task: Task) -> None:
    """Raise OptionError for media that cannot be read, or that others are missing for."""
    for field in ("mask", "outpaint"):
        if getattr(request, field) is not None and request.control_video is None and "control_video" in fields(task):
            raise OptionError(f"--{field} says what of a video is made anew: give --control-video as well")
    if request.outpaint is not None and (request.image or request.last_image):
        raise OptionError("--outpaint and --image given: frames that are known are not as large as the padded video")
    if request.outpaint is not None and (size := picture_of(request)) is not None:
        check_picture_size(*size, "--control-video with what --outpaint adds")
    if request.mask is not None:
        picture_size(request.mask) if is_picture(request.mask) else video_facts(request.mask)
    for path in (request.reference, request.image, request.last_image):
        if path is not None:
            picture_size(path)


def fields(task: Task) -> tuple[str, ...]:
    rules = family_of(task).media
    return () if rules is None else (*rules.needs, *rules.takes)


def is_picture(path: str) -> bool:
    return Path(path).suffix.lower() in PICTURE_FILES


def picture_of(request: Request) -> tuple[int, int] | None:
    """(width, height) of what has the aspect of the video; None where nothing is given that has."""
    if request.control_video is not None:
        width, height = video_facts(request.control_video)[:2]
        left, top, right, bottom = request.outpaint or (0, 0, 0, 0)
        return width + left + right, height + top + bottom
    path = request.image or request.last_image
    return None if path is None else picture_size(path)


def load_control(request: Request, task: Task, size: tuple[int, int], fps: int, frames: int) -> Media:
    """The media of `request`, fitted to `size` (width, height): references with white bars, everything else covers it.
    frames: at most so many of a video. Raises OptionError."""
    rules = family_of(task).media
    assert rules is not None
    found: dict[str, Pixels] = {}
    if request.reference is not None:
        picture = np.rint(load_image(request.reference) * 255).astype(np.uint8)
        found["reference"] = fit_with_bars(picture, size, by_area=True, bars=WHITE)[None]
    if request.control_video is not None:
        found["control_video"] = covering(request.control_video, size, fps, frames, request.outpaint, GREY)
    if request.mask is not None:
        found["mask"] = covering(request.mask, size, fps, frames, request.outpaint, WHITE)
    elif request.outpaint is not None and request.control_video is not None:
        width, height = video_facts(request.control_video)[:2]
        inside = np.zeros((1, height, width, 3), np.uint8)
        found["mask"] = np.stack([fit_covering(one, size) for one in padded(inside, request.outpaint, WHITE)])
    elif "mask" in rules.always:
        found["mask"] = np.full((1, size[1], size[0], 3), WHITE, np.uint8)
    camera = None if request.camera is None else partial(rays_of, request.camera, size, frames)
    return Media(found, Box(0, 0, *size), rules, camera=camera)


def rays_of(camera: str, size: tuple[int, int], frames: int, clip: Clip) -> Tensor:
    """Of a clip of a video of so many frames [1, 24, T, H, W]."""
    path = read_camera(camera, pose_count(camera) or frames)
    return camera_rays(path.part(clip.first, clip.last), *size)


def covering(
    path: str, size: tuple[int, int], fps: int, frames: int, outpaint: tuple[int, int, int, int] | None, border: int
) -> Pixels:
    """The frames of a video at `fps`, or a picture: uint8 [F, H, W, 3]."""
    if is_picture(path):
        video = np.rint(load_image(path) * 255).astype(np.uint8)[None]
        chosen = np.zeros(1, np.int64)
    else:
        chosen = frame_indices(path, fps)[:frames]
        video = read_video(path, max_frames=int(chosen.max()) + 1, max_pixels=MAX_DRIVING)
    found = np.empty((len(chosen), size[1], size[0], 3), np.uint8)
    for place, index in enumerate(chosen):
        found[place] = fit_covering(padded(video[index : index + 1], outpaint, border)[0], size)
    return found


def padded(video: Pixels, outpaint: tuple[int, int, int, int] | None, border: int) -> Pixels:
    """[F, H, W, 3] with so many pixels of the grey value `border` to the left, top, right and bottom."""
    left, top, right, bottom = outpaint or (0, 0, 0, 0)
    return np.pad(video, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=border)


def images_covering(images: Tensor, size: tuple[int, int], frames: int, rest: float) -> Tensor:
    """Pictures [F, H, W, 3] in 0..1, as on ComfyUI's IMAGE socket, or a MASK [F, H, W], scaled to cover `size` (width,
    height) and cropped: [1, 3, frames, H, W] in -1..1. rest: the value of frames that are missing."""
    images = (images[..., None].expand(-1, -1, -1, 3) if images.ndim == 3 else images[..., :3])[:frames].cpu().float()
    fitted = torch.stack([torch.from_numpy(fit_image(one, size)) for one in images.numpy()])
    return F.pad(pixels_to_video(fitted), (0, 0, 0, 0, 0, frames - len(fitted)), value=rest)


def references_of(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures [N, H, W, 3] in 0..1 -> [N, 3, 1, H, W] in -1..1, each fitted into `size` with white bars."""
    whole = (images[..., :3].cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    fitted = np.stack([fit_with_bars(one, size, by_area=True, bars=WHITE) for one in whole])
    return as_video(fitted)[0].transpose(0, 1)[:, :, None]
