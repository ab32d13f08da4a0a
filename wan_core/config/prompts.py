"""Prompts over time: which text a frame of the video follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from wan_core.config.checks import OptionError

FORM = "write FRAME=TEXT, as 40='the dog runs away'"
LEAST = 4  # frames from one prompt to the next: latents have a frame for every four


@dataclass(frozen=True, kw_only=True)
class PromptAt:
    """A prompt that holds from a frame of the video on, from 0, up to that of the next. Raises OptionError."""

    frame: int
    text: str

    def __post_init__(self) -> None:
        if self.frame < 0 or not self.text.strip():
            raise OptionError(f"prompt {self.frame}={self.text[:40]!r} given; {FORM}")

    @classmethod
    def parse(cls, text: str) -> PromptAt:
        """`FRAME=TEXT`. Raises OptionError."""
        number, sign, words = text.partition("=")
        number = number.strip()
        if not sign or not number.isdecimal() or len(number) > 9:
            raise OptionError(f"prompt {text[:60]!r} given; {FORM}")
        return cls(frame=int(number), text=words.strip())


def check_prompts(starts: Sequence[int], frames: int | None = None) -> None:
    """Raise OptionError unless prompts that begin at these frames follow one another from frame 0 on, in a video of so
    many frames. None: its length is not known yet."""
    shown = ", ".join(map(str, starts))
    if starts and starts[0] != 0:
        raise OptionError(f"prompts at frames {shown} given; the first begins at frame 0, or earlier frames have none")
    for one, following in pairwise(starts):
        if following <= one:
            raise OptionError(f"prompts at frames {shown} given: write them in the order of their frames, each once")
        if following - one < LEAST:
            raise OptionError(
                f"prompts at frames {one} and {following} given; from one to the next are at least {LEAST} frames"
            )
    if starts and frames is not None and starts[-1] >= frames:
        raise OptionError(
            f"a prompt at frame {starts[-1]} given for a video of {frames} frames, which are 0 to {frames - 1}"
        )
