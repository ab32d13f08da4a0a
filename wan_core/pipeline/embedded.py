"""What the embedded model was trained on: its captions, sides and frames. Its videos of anything else are noise, and a
user should know why.

A `Scene` is four words (colour, shape, motion, background). Its caption is one English sentence, which `parse_caption`
parses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from wan_core.models.wan.families import Task, family_of

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
SHAPES = ("circle", "square", "triangle", "cross")
MOTIONS = ("left", "right", "up", "down", "still")
SIDES = (64, 128)  # pixels: the smallest and the largest side in training
FRAMES = 17
EXAMPLE = "a red circle moving right on a blue background"


@dataclass(frozen=True)
class Scene:
    """A clip as four words. Raises ValueError if a word is unknown or the shape has the background's colour."""

    colour: str
    shape: str
    motion: str
    background: str

    def __post_init__(self) -> None:
        for field, allowed in (("colour", COLOURS), ("shape", SHAPES), ("motion", MOTIONS), ("background", COLOURS)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} {getattr(self, field)!r} is unknown: use one of {', '.join(allowed)}")
        if self.colour == self.background:
            raise ValueError(f"the shape and the background are both {self.colour}: give them different colours")

    @property
    def caption(self) -> str:
        moves = "standing still" if self.motion == "still" else f"moving {self.motion}"
        subject = f"{_article(self.colour)} {self.colour} {self.shape} {moves}"
        return f"{subject} on {_article(self.background)} {self.background} background"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


_GRAMMAR = re.compile(r"an? (\w+) (\w+) (?:moving (left|right|up|down)|standing (still)) on an? (\w+) background")


def parse_caption(text: str) -> Scene:
    """The scene of a caption; case, extra spaces and a final full stop are ignored.

    Raises ValueError, with the allowed grammar, for other captions.
    """
    match = _GRAMMAR.fullmatch(" ".join(text.lower().rstrip(". \t\n").split()))
    if match is None:
        raise ValueError(
            f"caption {text!r} is not of the form 'a COLOUR SHAPE moving DIRECTION on a COLOUR background' or "
            f"'a COLOUR SHAPE standing still on a COLOUR background': COLOUR is one of {', '.join(COLOURS)}; "
            f"SHAPE is one of {', '.join(SHAPES)}; DIRECTION is one of {', '.join(MOTIONS[:4])}"
        )
    colour, shape, direction, still, background = match.groups()
    return Scene(colour, shape, direction or still, background)


def unknown_to(task: Task, prompts: Sequence[str], width: int, height: int, frames: int) -> list[str]:
    """What the embedded model is asked for and never saw; nothing for others. frames: that one forward sees."""
    if task.release != "embedded":
        return []
    notes = []
    if not family_of(task).driven and not all(map(is_caption, prompts)):  # a driving video says what moves
        notes.append(
            f"the embedded model knows only captions such as {EXAMPLE!r}; of other prompts it makes stripes and noise. "
            "Load a Wan model for prompts of your own"
        )
    low, high = SIDES
    if not low <= min(width, height) <= max(width, height) <= high:
        notes.append(f"the embedded model saw sides of {low} to {high} pixels in training; {width}x{height} is given")
    if frames > FRAMES:
        notes.append(f"the embedded model saw videos of {FRAMES} frames in training; {frames} are asked for")
    return notes


def is_caption(prompt: str) -> bool:
    try:
        parse_caption(prompt)
    except ValueError:
        return False
    return True
