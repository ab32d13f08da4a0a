"""Error classes of the project, and shared checks of options.

The checks run before any work. Their messages say what was given, what is allowed and what to do.
"""

from __future__ import annotations


class UserError(ValueError):
    """The input is wrong; the message is written for the user. Base class of all such errors."""


class OptionError(UserError):
    """An option is out of range: the message says what was given, what is allowed and what to do."""


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise OptionError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise OptionError(f"{name} {value!r} is not known; use one of: {', '.join(allowed)}")


def check_range(name: str, value: float, low: float, high: float, advice: str) -> None:
    """Raise OptionError unless low <= value <= high; `advice` names usual values."""
    if not low <= value <= high:
        raise OptionError(f"{name} {value:g} given; allowed are {low:g} to {high:g} ({advice})")


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of WIDTHxHEIGHT. Raises OptionError."""
    width, x, height = text.lower().partition("x")
    if not (x and width.isdecimal() and height.isdecimal() and len(text) <= 16):
        raise OptionError(f"{text[:40]!r} is not a size; write WIDTHxHEIGHT, for example 1280x720")
    return int(width), int(height)


def check_size(width: int, height: int, frames: int, *, multiple: int, temporal: int = 4) -> None:
    """Raise OptionError unless width and height are multiples of `multiple` pixels and frames is temporal * n + 1."""
    if width < multiple or height < multiple or width % multiple or height % multiple:
        nearest = [max(multiple, round(v / multiple) * multiple) for v in (width, height)]
        raise OptionError(
            f"size {width}x{height} given; width and height must be multiples of {multiple}. "
            f"The nearest is {nearest[0]}x{nearest[1]}."
        )
    if frames < 1 or (frames - 1) % temporal:
        nearest_frames = max(0, round((frames - 1) / temporal)) * temporal + 1
        raise OptionError(
            f"{frames} frames given; the count must be {temporal}n + 1 (1, {temporal + 1}, ..., 81). "
            f"The nearest is {nearest_frames}."
        )
