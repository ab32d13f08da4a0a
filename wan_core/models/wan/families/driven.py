"""What the families share that a request's media drive: checks, the size and length of the video, the media of its
clips. Imports no torch.

`DrivenFamily`: a reference picture moves as videos or a sound say. `ControlledFamily`: the video follows a control
video or a camera, and the size is the request's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import lcm
from typing import TYPE_CHECKING

from wan_core.config import OptionError, Request
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.clips import Clip, bounced
from wan_core.models.wan.families.family import BEGINS, VIDEOS, Family, Hear, VideoSize, given_fields, option
from wan_core.models.wan.families.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.media.fit import Box, Pixels
    from wan_core.models.wan.families.media import Media


class MediaFamily(Family):
    """A family that is driven by media. together: fields of the request that are given together or not at all."""

    driven = True
    together: tuple[str, ...] = ()

    def check_request(self, request: Request, task: Task) -> None:
        self.check_fields(request, task)
        if missing := [option(field) for field in self.needs if getattr(request, field) is None]:
            names = " and ".join(field.replace("_", " ") for field in self.needs)
            raise OptionError(f"{task.name} makes a video of a {names}: give {' and '.join(missing)}")
        if len({getattr(request, field) is not None for field in self.together}) > 1:
            raise OptionError(f"only one of {' and '.join(map(option, self.together))} given: give both, or neither")
        self.check_begins(task, given_fields(request, BEGINS))

    def check_begins(self, task: Task, fields: list[str]) -> None:
        for field in fields:
            if field not in (*self.needs, *self.takes):
                own = "its picture is --reference" if "reference" in self.needs else "leave it out"
                raise OptionError(f"{task.name} takes no {option(field)}: {own}")

    def frames_of(self, clip: Clip, length: int) -> list[int]:
        """Which frames of a driving video of `length` frames drive a clip: it is played to and fro."""
        return [bounced(index, length) for index in range(clip.first, clip.end)]


class DrivenFamily(MediaFamily):
    """A reference picture moves as driving videos or a sound say.

    length_of: the field that the video is as long as. size_step: a size that follows the reference is a multiple of so
    many pixels. seen_fields: CLIP sees the first frame of these.
    """

    needs = ("reference", "pose_video")
    length_of = "pose_video"
    size_step = 1
    seen_fields: tuple[str, ...] = ("reference",)

    def video_size(self, request: Request, task: Task, multiple: int) -> VideoSize:
        from wan_core.media.video import picture_size, video_facts

        assert request.reference is not None
        picture_size(request.reference)
        for path in (getattr(request, field) for field in VIDEOS):
            if path is not None:
                video_facts(path)
        fps, most = self.whole_length(request, task)
        if request.frames is not None and request.frames > most:
            path = getattr(request, self.length_of)
            raise OptionError(f"{path} has {most} frames, and {request.frames} are asked for: use fewer")
        frames = most if request.frames is None else request.frames
        if request.width is not None and request.height is not None:
            return VideoSize(request.width, request.height, frames, fps)
        return VideoSize(*self.own_size(request, task, multiple), frames, fps)

    def whole_length(self, request: Request, task: Task) -> tuple[int, int]:
        """Frames per second and frames of a video that follows its media to their end."""
        from wan_core.media.video import video_facts

        assert request.pose_video is not None
        fps = task.fps if request.fps is None else request.fps
        return fps, len(video_facts(request.pose_video).frames_at(self.read_rate(request.pose_video, fps)))

    def read_rate(self, path: str, fps: int) -> float:
        """Frames per second at which a driving video is read, for a video of `fps`."""
        return fps

    def own_size(self, request: Request, task: Task, multiple: int) -> tuple[int, int]:
        """(width, height) where none is asked for: the aspect of the reference, about as many pixels as the task's."""
        from wan_core.media.video import picture_size
        from wan_core.models.wan.families.media import size_of_area

        assert request.reference is not None
        size = picture_size(request.reference)
        return size_of_area(size, task.width * task.height, lcm(multiple, self.size_step))

    def fit(self, pixels: Pixels, size: tuple[int, int]) -> Pixels:
        """A picture or frame [H, W, 3] in `size` (width, height): with black bars."""
        from wan_core.media.fit import fit_with_bars

        return fit_with_bars(pixels, size)

    def size_in(self, field: str, dit: DiTConfig, size: tuple[int, int]) -> tuple[int, int]:
        """The size (width, height) that the frames of a field are fitted to, in a video of `size`."""
        return size

    def shown(self, picture: tuple[int, int], size: tuple[int, int]) -> Box:
        """What of a frame is shown, for a reference of the size `picture`."""
        from wan_core.media.fit import Box

        return Box(0, 0, *size)

    def load_media(
        self, request: Request, dit: DiTConfig, size: tuple[int, int], fps: int, clip: Clip, hear: Hear
    ) -> Media:
        from wan_core.media.video import picture_size
        from wan_core.models.wan.families.media import Media, read_fitted, read_picture

        assert request.reference is not None
        pixels = {"reference": self.fit(read_picture(request.reference), size)[None]}
        for field in VIDEOS:
            if (path := getattr(request, field)) is not None:
                own = self.size_in(field, dit, size)
                rate = self.read_rate(path, fps)
                pixels[field] = read_fitted(path, rate, clip.end, own, partial(self.fit, size=own))
        return Media(pixels, self.shown(picture_size(request.reference), size), self.frames_of)

    def images_of(self, images: Tensor, size: tuple[int, int], clip: Clip) -> Tensor:
        """Pictures or a MASK on a socket of ComfyUI, for a clip, as `Media.of` has those of files."""
        from wan_core.models.wan.families.media import fitted_images

        return fitted_images(images, size, clip.frames, self.frames_of(clip, len(images)), partial(self.fit, size=size))

    def pictures_seen(
        self, task: Task, media: Mapping[str, Tensor], clip: Clip, known: Callable[[], Tensor | None]
    ) -> dict[str, Tensor]:
        return {field: media[field][:, :, :1] for field in self.seen_fields}


class ControlledFamily(MediaFamily):
    """A video that follows a control video or a camera, and may begin with known frames."""

    def video_size(self, request: Request, task: Task, multiple: int) -> VideoSize:
        """What the request leaves open: as long as what it follows, up to the task's length, and of the aspect of the
        control video or else of a known frame."""
        from wan_core.models.wan.families.media import size_of_area

        self.check_files(request)
        fps = task.fps if request.fps is None else request.fps
        lengths = self.lengths(request, fps)
        for name, most in lengths.items():
            if request.frames is not None and request.frames > most:
                raise OptionError(f"{name} has {most} frames, and {request.frames} are asked for: use fewer")
        frames = request.frames
        if frames is None:
            longest = min([*lengths.values()] or [task.frames])
            frames = longest if request.clip_frames else (min(longest, task.frames) - 1) // 4 * 4 + 1
        if request.width is not None and request.height is not None:
            return VideoSize(request.width, request.height, frames, fps)
        picture = self.aspect_of(request)
        size = (task.width, task.height)
        if picture is not None:
            size = size_of_area(picture, task.width * task.height, multiple)
        return VideoSize(*size, frames, fps)

    def check_files(self, request: Request) -> None:
        """Raise OptionError for pictures that cannot be read."""
        from wan_core.media.video import picture_size

        for path in (request.reference, *request.pictures):
            if path is not None:
                picture_size(path)

    def lengths(self, request: Request, fps: int) -> dict[str, int]:
        """Frames of what the video follows, by its name in messages."""
        from wan_core.media.video import video_facts

        path = request.control_video
        return {} if path is None else {path: len(video_facts(path).frames_at(fps))}

    def aspect_of(self, request: Request) -> tuple[int, int] | None:
        """(width, height) of the input whose aspect the video takes; None without such an input."""
        from wan_core.media.video import picture_size, video_facts

        if request.control_video is not None:
            return video_facts(request.control_video)[:2]
        return picture_size(request.pictures[0]) if request.pictures else None

    def fit_control(self, request: Request, size: tuple[int, int], frame: Pixels) -> Pixels:
        """A frame of the control video [H, W, 3] in `size` (width, height)."""
        from wan_core.media.fit import fit_covering

        return fit_covering(frame, size)

    def load_media(
        self, request: Request, dit: DiTConfig, size: tuple[int, int], fps: int, clip: Clip, hear: Hear
    ) -> Media:
        """References are fitted with white bars, all else covers the size."""
        from wan_core.media.fit import Box
        from wan_core.models.wan.families.media import Media, fit_reference, read_fitted, read_picture

        pixels: dict[str, Pixels] = {}
        if request.reference is not None:
            pixels["reference"] = fit_reference(read_picture(request.reference), size)[None]
        if request.control_video is not None:
            fit = partial(self.fit_control, request, size)
            pixels["control_video"] = read_fitted(request.control_video, fps, clip.end, size, fit)
        return Media(pixels, Box(0, 0, *size), self.frames_of)
