"""How a long video is cut into clips, and which videos and pictures drive a family. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from wan_core.config.checks import OptionError


class Clip(NamedTuple):
    """frames: of the clip, from the frame `first` of the padded video on. carried: so many of them are the last frames
    of the clip before."""

    number: int  # from 0
    first: int
    frames: int
    carried: int

    @property
    def last(self) -> int:
        """One more than its last frame."""
        return self.first + self.frames


def whole_clips(frames: int, clip: int, overlap: int) -> int:
    """Frames of a video padded to whole clips. Source: `get_valid_len` of Wan2.2/wan/animate.py."""
    new = clip - overlap
    return overlap + max(1, -(-(frames - overlap) // new)) * new


def whole_latents(frames: int, clip: int, overlap: int) -> int:
    """Frames of a video padded to whole latent frames: 4n + 1. Its last clip may be a short one."""
    return (frames + 2) // 4 * 4 + 1


@dataclass(frozen=True, kw_only=True)
class ClipRules:
    """How a family cuts a long video.

    overlaps: how many frames a clip may have from the one before; the first is the default. always: a video that is
    longer than the task's clip is cut without being asked. leading: latent frames before those of the video.
    longer: clips after the first have so many frames more; what drives the first has them, too. history: a clip is
    given so many frames that were made before it, beside its own. padded(frames, clip, overlap): frames of the padded
    video.
    """

    overlaps: tuple[int, ...]
    always: bool = False
    leading: int = 0
    longer: int = 0
    history: int = 0
    padded: Callable[[int, int, int], int] = whole_clips

    def driving(self, clip: Clip) -> Clip:
        """Which frames of its media drive a clip."""
        if clip.number:
            return clip._replace(first=clip.first + self.longer)
        return clip._replace(frames=clip.frames + self.longer)


@dataclass(frozen=True, kw_only=True)
class MediaRules:
    """Which fields of a request drive a family.

    needs, takes: they must, and may be given. together: fields that are given together or not at all. size_of: whose
    size the video has, where none is asked for, in steps of `step` pixels; `least` are needed in width and height.
    length_of: what it is as long as. resampled: driving videos are read at the video's rate; otherwise all of their
    frames are, and the video gets the rate of `pose_video`. cropped: the bars beside the fitted reference are cut off.
    covering: pictures fill the size and what sticks out is cut off, without bars. by_area: a picture that gets smaller
    is averaged, not interpolated. past_end: a driving video that is too short is played to and fro, or goes on in
    black. seen: fields whose first frame CLIP sees. front: pictures that are a latent frame before those of the video.
    beside: pictures that are a frame of tokens before those of the video, and no latents. always: fields that a clip
    has also where they are not given. settings: fields of a request beside media that may
    be given. For `size_of="given"` see `wan_core.pipeline.control_media`.
    """

    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    size_of: Literal["pose_video", "reference", "given"]
    step: int = 1
    least: int = 1
    length_of: Literal["pose_video", "audio"] = "pose_video"
    resampled: bool = False
    cropped: bool = False
    covering: bool = False
    by_area: bool = False
    past_end: Literal["to and fro", "black"] = "to and fro"
    seen: tuple[str, ...] = ("reference",)
    settings: tuple[str, ...] = ()
    front: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    always: tuple[str, ...] = ()


def cut_clips(rules: ClipRules, frames: int, clip: int, overlap: int) -> tuple[Clip, ...]:
    """The clips of a video of so many frames. Clips that would have nothing of it, but padding, are left out."""
    total, found, first = rules.padded(frames, clip, overlap), [], 0
    while not found or first + overlap < frames:
        size = min(clip + (rules.longer if found else 0), total - first)
        found.append(Clip(len(found), first, size, overlap if found else 0))
        first += size - overlap
    return tuple(found)


def check_clips(rules: ClipRules, clip: int, overlap: int, task: str) -> None:
    """Raises OptionError."""
    if overlap not in rules.overlaps:
        raise OptionError(
            f"overlap {overlap} given; clips of {task} begin with {' or '.join(map(str, rules.overlaps))} frames of "
            "the one before"
        )
    if clip < 5 or clip % 4 != 1 or clip <= overlap:
        raise OptionError(
            f"clips of {clip} frames with an overlap of {overlap} given; a clip has 4n + 1 frames (5, 9, ..., 81), "
            "more than the overlap"
        )


def bounced(index: int, length: int) -> int:
    """Frame `index` of a video of so many frames that is played to and fro without end."""
    place = index % max(1, 2 * (length - 1))
    return place if place < length else 2 * (length - 1) - place
