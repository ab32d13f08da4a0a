"""Options of context windows (`Request.windows`): each forward sees some frames of a long video, and what the windows
predict is fused in every step. Frames here are latent frames, of which all but the first are 4 frames of the video."""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.config.checks import OptionError
from wan_core.config.table import check, option, parse_words, spelled

# Both tables by ComfyUI's names; `wan_core.sampling.context_windows` has the rules.
WINDOW_SCHEDULES = ("standard_static", "standard_uniform", "looped_uniform", "batched")
FUSE_METHODS = ("pyramid", "relative", "flat", "overlap-linear")
STILL_WINDOWS = ("standard_static", "batched")  # the same in every step
FORM = (
    "length/overlap in frames of the video such as 81/28, then words after colons: a schedule "
    f"({', '.join(WINDOW_SCHEDULES)}), a fuse method ({', '.join(FUSE_METHODS)}), closed, retain, plain, nolead, split"
)


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Windows of `length` latent frames, of which neighbours share `overlap`; widgets have frames of the video. Raises
    OptionError.

    schedule: where windows are: "standard_static" the same in every step, "standard_uniform" moved from step to step,
    "looped_uniform" also past the end, on to the first frames, "batched" one after the other. fuse: how much a window
    counts where several overlap. freenoise: the noise of later frames is that of earlier ones in another order.
    retain_first: every window of an image-to-video model sees the first frame's image in its first place. closed_loop:
    a looped window also joins the last frame to the first. lead: a window that begins later sees the frame before it,
    too; the VAE's first latent frame is one frame of the video and all others are four. split: each window takes one of
    several texts, that of its middle.
    """

    length: int = option(
        tip="Frames that a forward sees, a multiple of 4 plus 1. A video that is not longer runs as without this node.",
        shown=81,
        least=1,
        most=100001,
        step=4,
    )
    overlap: int = option(
        tip="Frames that neighbouring windows share, counted in whole latent frames of 4. More makes smoother "
        "changes and takes more windows.",
        shown=28,
        least=0,
        most=100000,
    )
    schedule: str = option(
        "standard_uniform",
        name="window schedule",
        choices=WINDOW_SCHEDULES,
        tip="Where the windows are. standard_static: the same in every step, as step caches need. "
        "standard_uniform: moved from step to step. looped_uniform: also past the end, on to the first frames. "
        "batched: one after the other, without overlap.",
        words={name: name for name in WINDOW_SCHEDULES},
    )
    fuse: str = option(
        "pyramid",
        name="fuse method",
        choices=FUSE_METHODS,
        tip="How much each window counts where several overlap. pyramid and relative: most in its middle. flat: "
        "all the same. overlap-linear: falling within the overlap alone.",
        words={name: name for name in FUSE_METHODS},
    )
    closed_loop: bool = option(
        False,
        tip="For looped_uniform: a window also joins the last frame to the first.",
        advanced=True,
        words={"closed": True},
    )
    freenoise: bool = option(
        True,
        tip="Later frames begin with the noise of earlier ones in another order, so that windows fit together better.",
        advanced=True,
        words={"plain": False},
    )
    retain_first: bool = option(
        False,
        tip="For image to video: every window sees the first frame's image in its first place.",
        advanced=True,
        words={"retain": True},
    )
    lead: bool = option(True, words={"nolead": False})
    split: bool = option(
        False,
        tip="Each window takes one of several texts, which are combined (Conditioning (Combine)) in the order of the "
        "video and share its length evenly.",
        advanced=True,
        added=True,
        words={"split": True},
    )

    def __post_init__(self) -> None:
        check(self)
        if not 0 <= self.overlap < self.length:
            raise OptionError(
                f"context windows of {self.length} latent frames with an overlap of {self.overlap} given; the length "
                "is at least 1, the overlap 0 or more and smaller than the length"
            )
        if self.closed_loop and self.schedule != "looped_uniform":
            raise OptionError(f"closed context windows of the schedule {self.schedule} given: use looped_uniform")
        if self.fuse == "overlap-linear" and self.schedule == "batched":
            raise OptionError("windows of the schedule batched do not overlap: use another fuse method")

    @property
    def moves(self) -> bool:
        """Whether windows are elsewhere in the next step."""
        return self.schedule not in STILL_WINDOWS

    def seen(self, window: tuple[int, ...]) -> tuple[int, ...]:
        """The frames that a forward for `window` sees."""
        return (window[0] - 1, *window) if self.lead and window[0] > 0 else window

    @classmethod
    def parse(cls, text: str) -> WindowOptions:
        """`LENGTH[/OVERLAP]` in frames of the video and words after colons; without an overlap a third of the length.
        As in ComfyUI's node, an overlap counts in whole latent frames. Raises OptionError."""
        size, *words = text.split(":")
        try:
            chosen = parse_words(cls, words)
        except ValueError as fault:
            raise OptionError(
                f"context windows {text!r} given, {fault.args[0]!r} unknown or once too often; write {FORM}"
            ) from None
        numbers = size.split("/")
        if len(numbers) > 2 or not all(number.isdecimal() for number in numbers) or int(numbers[0]) % 4 != 1:
            raise OptionError(f"context windows {text!r} given; the length is 4n + 1 frames; write {FORM}")
        if len(numbers) == 2 and int(numbers[1]) >= int(numbers[0]):
            raise OptionError(f"context windows {text!r} given; the overlap is smaller than the length")
        length = (int(numbers[0]) - 1) // 4 + 1
        return cls(length=length, overlap=int(numbers[1]) // 4 if len(numbers) == 2 else length // 3, **chosen)

    def words(self) -> str:
        """The options as text that `parse` reads, with every field."""
        flags = spelled(self, "closed_loop", "retain_first", "freenoise", "lead", "split")
        return ":".join([f"{4 * self.length - 3}/{4 * self.overlap}", self.schedule, self.fuse, *flags])


def check_one_way(windows: WindowOptions | None, clip_frames: int | None, overlap: int | None) -> None:
    """Raise OptionError where a long video is to be made in two ways. overlap: of clips."""
    if windows is None or (clip_frames is None and overlap is None):
        return
    given = f"clips of {clip_frames} frames" if clip_frames is not None else f"an overlap of clips of {overlap} frames"
    raise OptionError(
        f"context windows {windows.words()} and {given} given, which make a long video in different ways: choose one"
        " (an overlap of windows is part of their option)"
    )
