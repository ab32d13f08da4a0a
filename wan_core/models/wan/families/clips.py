"""How a long video is cut into clips, and what they cost together. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from wan_core.config.checks import OptionError

PER_LATENT = 4  # video frames of a latent frame, but for the first


class Clip(NamedTuple):
    """frames: from the frame `first` of the padded video on. carried: so many are the last ones of the clip before."""

    number: int  # from 0
    first: int
    frames: int
    carried: int

    @property
    def end(self) -> int:
        return self.first + self.frames


def whole_clips(frames: int, clip: int, overlap: int) -> int:
    """Frames of a video padded to whole clips, where it is longer than one. Source: `get_valid_len` of
    Wan2.2/wan/animate.py, which also pads the others."""
    if frames <= clip:
        return whole_latents(frames)
    new = clip - overlap
    return overlap + -(-(frames - overlap) // new) * new


def whole_latents(frames: int, clip: int = 0, overlap: int = 0) -> int:
    """Frames of a video padded to whole latent frames: 4n + 1. Its last clip may be a short one."""
    return (frames + 2) // 4 * 4 + 1


@dataclass(frozen=True, kw_only=True)
class ClipRules:
    """How a family cuts a long video.

    overlaps: how many frames a clip may have from the one before; the first is the default. always: a video that is
    longer than the task's clip is cut without being asked. leading: latent frames before those of the video.
    longer: clips after the first have so many frames more; what drives the first has them, too. history: a clip is
    given so many frames that were made before it, beside its own. anchored: a clip is given an anchor picture, and of
    the clip before its last latents, which are its own second and later ones. padded(frames, clip, overlap): frames of
    the padded video.
    """

    overlaps: tuple[int, ...]
    always: bool = False
    leading: int = 0
    longer: int = 0
    history: int = 0
    anchored: bool = False
    padded: Callable[[int, int, int], int] = whole_clips

    def driving(self, clip: Clip) -> Clip:
        """Which frames of its media drive a clip."""
        if clip.number:
            return clip._replace(first=clip.first + self.longer)
        return clip._replace(frames=clip.frames + self.longer)


def cut_clips(rules: ClipRules, frames: int, clip: int, overlap: int) -> tuple[Clip, ...]:
    """The clips of a video of so many frames. Clips that would have nothing of it, but padding, are left out."""
    total, clips, first = rules.padded(frames, clip, overlap), [], 0
    while not clips or first + overlap < frames:
        size = min(clip + (rules.longer if clips else 0), total - first)
        clips.append(Clip(len(clips), first, size, overlap if clips else 0))
        first += size - overlap
    return tuple(clips)


def frames_of_latents(latents: Iterable[int]) -> list[int]:
    """The video frames of latent frames, from 0."""
    return [n for latent in latents for n in range(max(0, PER_LATENT * (latent - 1) + 1), PER_LATENT * latent + 1)]


def latents_of(carried: int) -> int:
    """The latents of the clip before that an anchored clip is given, for so many frames: the first is the anchor's."""
    return (carried - 1) // PER_LATENT


def check_clips(rules: ClipRules, clip: int, overlap: int, task: str) -> None:
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


@dataclass(frozen=True)
class LongVideo:
    """clips: one where a video is made in one piece. leading: latent frames of each clip before those of the video.
    anchored: as in `ClipRules`."""

    clips: tuple[Clip, ...]
    leading: int = 0
    anchored: bool = False

    @property
    def cost(self) -> float:
        """The cost of all clips over that of the first: by latent frames, to which tokens are proportional."""
        latents = [(clip.frames - 1) // PER_LATENT + 1 + self.leading for clip in self.clips]
        return sum(latents) / latents[0]

    def words(self, steps: int) -> str:
        """`3 of 77 frames, 1 carried over: 3 x 20 steps`."""
        count, carried = len(self.clips), self.clips[-1].carried
        lengths = " and ".join(str(n) for n in dict.fromkeys(clip.frames for clip in self.clips))
        over = f", {carried} carried over" if carried else ""
        if self.anchored and carried:
            handed = latents_of(carried)
            over = f", {handed} latent{'s' * (handed != 1)} carried over"
        return f"{count} of {lengths} frames{over}: {count} x {steps} steps"
