"""The sound of the file that is written (S2V)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wan_core.media.sound import Sound


def sound_of(audio: str | None) -> Sound | None:
    """Of the file that is written, for the `audio` of a request. Raises OptionError."""
    if audio is None:
        return None
    from wan_core.media.sound import read_sound

    return read_sound(audio)
