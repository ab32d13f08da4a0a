"""The clips of a long video, and what they cost together. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wan_core.config.checks import OptionError
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.clips import Clip, check_clips, cut_clips
from wan_core.models.wan.families.family import Task

PER_LATENT = 4  # video frames of a latent frame, but for the first


@dataclass(frozen=True)
class LongVideo:
    """clips: one where a video is made in one piece. leading: latent frames of each clip before those of the video."""

    clips: tuple[Clip, ...]
    leading: int = 0

    @property
    def cost(self) -> float:
        """Of all clips, in times the first one's: by latent frames, to which tokens are proportional."""
        latents = [(clip.frames - 1) // PER_LATENT + 1 + self.leading for clip in self.clips]
        return sum(latents) / latents[0]

    def words(self, steps: int) -> str:
        """`3 of 77 frames, 1 carried over: 3 x 20 steps`."""
        count, carried = len(self.clips), self.clips[-1].carried
        lengths = " and ".join(str(n) for n in dict.fromkeys(clip.frames for clip in self.clips))
        over = f", {carried} carried over" if carried else ""
        return f"{count} of {lengths} frames{over}: {count} x {steps} steps"

    def as_list(self) -> list[dict[str, Any]]:
        return [clip._asdict() for clip in self.clips]


def cut_video(
    task: Task, frames: int, clip_frames: int | None = None, overlap: int | None = None, *, from_noise: bool = True
) -> LongVideo:
    """How a video of so many frames is made. clip_frames, overlap: None stands for the family's. from_noise: no last
    picture and no video is given. Raises OptionError."""
    rules, media = family_of(task).clips, family_of(task).media
    leading = rules.leading
    if not (rules.always or clip_frames is not None):
        if overlap is not None:
            raise OptionError("clips of no frames asked for: give --clip-frames as well")
        return LongVideo((Clip(0, 0, frames, 0),), leading)
    clip = task.frames if clip_frames is None else clip_frames
    carried = rules.overlaps[0] if overlap is None else overlap
    check_clips(rules, clip, carried, task.name)
    if frames < 1:
        raise OptionError(f"{frames} frames given; a video has at least 1")
    if not rules.always and ((task.image == "none" and media is None) or not from_noise):
        raise OptionError(
            f"--clip-frames {clip} given: the next clip begins with frames of the one before, which needs an "
            "image-to-video model, and no --last-image or --from-video"
        )
    return LongVideo(cut_clips(rules, frames, clip, carried), leading)
