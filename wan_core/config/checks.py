"""Error classes of the project, and shared checks of options.

The checks run before any work. Their messages say what was given, what is allowed and what to do.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from wan_core.config.limits import MAX_PICTURE, MAX_SIDE, MAX_VIDEO_SIDE
from wan_core.config.printing import printable


class UserError(ValueError):
    """The input is wrong; the message is written for the user, in one printable line whatever a file says that it
    quotes. Base class of all such errors."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class OptionError(UserError):
    """An option is out of range: the message says what was given, what is allowed and what to do."""


class MissingPart(OptionError, AttributeError):
    """A node of others asks an object for an attribute that WanCore's does not have. `hasattr` and `getattr` with a
    default go on working."""


def nearly(given: str, allowed: Iterable[str]) -> str | None:
    """The one of `allowed` that may be meant by a word that is nearly right; None where none is near."""
    names = {name.lower(): name for name in allowed}
    found = get_close_matches(given.lower(), names, n=1, cutoff=0.7)
    return names[found[0]] if found else None


def meant_hint(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing, for the end of a message."""
    found = nearly(given, allowed)
    return f"; did you mean {found}?" if found else ""


def near_file(path: Path) -> str:
    """The hint of `meant_hint` for a file or folder that does not exist, by the names in its parent folder."""
    try:
        return meant_hint(path.name, os.listdir(path.parent))
    except OSError:  # no such folder either
        return ""


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise unknown(name, value, allowed)


def unknown(name: str, value: str, allowed: Iterable[str]) -> OptionError:
    """The error for a `value` that is not one of `allowed`."""
    names = list(allowed)
    return OptionError(f"{name} {value!r} is not known; use one of: {', '.join(names)}{meant_hint(value, names)}")


def check_range(name: str, value: float, low: float, high: float, advice: str = "") -> None:
    """Raise OptionError unless low <= value <= high; `advice` names usual values."""
    if not low <= value <= high:
        usual = f" ({advice})" if advice else ""
        raise OptionError(f"{name} {value:g} given; allowed are {low:g} to {high:g}{usual}")


def check_file_size(path: str | os.PathLike[str], limit: int) -> None:
    """Raise OptionError for a pipe, a device or a file of more than `limit` bytes, OSError if there is none."""
    status = Path(path).stat()
    size = status.st_size
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OptionError(f"{path} is a device or a pipe, and a file is needed")
    if size > limit:
        raise OptionError(f"{Path(path).name} has {size} bytes, and at most {limit} are read for a file of this kind")


def check_picture_size(width: int, height: int, what: str = "a picture") -> None:
    """Raise OptionError for a picture with too many pixels, in all or in a row: encoders refuse it hours later, and a
    video of its aspect is as narrow. what: what messages call it."""
    if max(width, height) > MAX_SIDE or width * height > MAX_PICTURE:
        raise OptionError(
            f"{what} has {width}x{height} pixels; at most {MAX_PICTURE // 10**6} million are allowed, and at most "
            f"{MAX_SIDE} in each direction: scale it down or crop it first"
        )


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of WIDTHxHEIGHT. Raises OptionError."""
    width, x, height = text.lower().partition("x")
    if not (x and width.isdecimal() and height.isdecimal() and len(text) <= 16):
        raise OptionError(f"{text[:40]!r} is not a size; write WIDTHxHEIGHT, for example 1280x720")
    return int(width), int(height)


def check_size(width: int, height: int, frames: int, *, multiple: int, temporal: int = 4) -> None:
    """Raise OptionError unless width and height are multiples, not too many pixels, and frames are temporal * n + 1."""
    if width < multiple or height < multiple or width % multiple or height % multiple:
        nearest = [max(multiple, round(v / multiple) * multiple) for v in (width, height)]
        raise OptionError(
            f"size {width}x{height} given; width and height must be multiples of {multiple}. "
            f"The nearest is {nearest[0]}x{nearest[1]}."
        )
    if max(width, height) > MAX_VIDEO_SIDE:
        raise OptionError(
            f"size {width}x{height} given, or taken from a picture's aspect; a video has at most {MAX_VIDEO_SIDE} "
            "pixels in each direction: give a smaller size, or crop the picture"
        )
    if frames < 1 or (frames - 1) % temporal:
        nearest_frames = max(0, round((frames - 1) / temporal)) * temporal + 1
        raise OptionError(
            f"{frames} frames given; there must be at least 1, and {temporal}n + 1 (1, {temporal + 1}, ..., 81). "
            f"The nearest is {nearest_frames}."
        )
