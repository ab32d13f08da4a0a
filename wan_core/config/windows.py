"""Options of context windows (`Request.windows`): each forward sees some frames of a long video, and what the windows
predict is fused in every step. Frames here are latent frames, of which all but the first are 4 frames of the video."""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.config.checks import OptionError, check_choice

# Both tables by ComfyUI's names; `wan_core.sampling.context_windows` has the rules.
WINDOW_SCHEDULES = ("standard_static", "standard_uniform", "looped_uniform", "batched")
FUSE_METHODS = ("pyramid", "relative", "flat", "overlap-linear")
STILL_WINDOWS = ("standard_static", "batched")  # the same in every step
FLAGS = {"closed": ("closed_loop", True), "retain": ("retain_first", True), "plain": ("freenoise", False)}
FLAGS |= {"nolead": ("lead", False)}
FORM = (
    "length/overlap in frames of the video such as 81/28, then words after colons: a schedule "
    f"({', '.join(WINDOW_SCHEDULES)}), a fuse method ({', '.join(FUSE_METHODS)}), {', '.join(FLAGS)}"
)


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Windows of `length` latent frames, of which neighbours share `overlap`. Raises OptionError.

    schedule: where windows are: "standard_static" the same in every step, "standard_uniform" moved from step to step,
    "looped_uniform" also past the end, on to the first frames, "batched" one after the other. fuse: how much a window
    counts where several overlap. closed_loop: a looped window also joins the last frame to the first. freenoise: the
    noise of later frames is that of earlier ones in another order. retain_first: every window of an image-to-video
    model sees the first frame's image in its first place. lead: a window that begins later sees the frame before it,
    too; the VAE's first latent frame is one frame of the video and all others are four.
    """

    length: int
    overlap: int
    schedule: str = "standard_uniform"
    fuse: str = "pyramid"
    closed_loop: bool = False
    freenoise: bool = True
    retain_first: bool = False
    lead: bool = True

    def __post_init__(self) -> None:
        check_choice("window schedule", self.schedule, WINDOW_SCHEDULES)
        check_choice("fuse method", self.fuse, FUSE_METHODS)
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
        given: dict[str, str | bool] = {}
        for word in words:
            field, value = FLAGS.get(word, ("schedule" if word in WINDOW_SCHEDULES else "fuse", word))
            if field in given or (field == "fuse" and word not in FUSE_METHODS):
                raise OptionError(f"context windows {text!r} given, {word!r} unknown or once too often; write {FORM}")
            given[field] = value
        numbers = size.split("/")
        if len(numbers) > 2 or not all(number.isdecimal() for number in numbers) or int(numbers[0]) % 4 != 1:
            raise OptionError(f"context windows {text!r} given; the length is 4n + 1 frames; write {FORM}")
        if len(numbers) == 2 and int(numbers[1]) >= int(numbers[0]):
            raise OptionError(f"context windows {text!r} given; the overlap is smaller than the length")
        length = (int(numbers[0]) - 1) // 4 + 1
        return cls(length=length, overlap=int(numbers[1]) // 4 if len(numbers) == 2 else length // 3, **given)  # type: ignore[arg-type]

    def words(self) -> str:
        """As `parse` reads it, in full."""
        flags = [word for word, (field, value) in FLAGS.items() if getattr(self, field) == value]
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
