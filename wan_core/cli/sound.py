"""Options of models that hear a sound (S2V), and the sound of the file that is written."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wan_core.media.sound import Sound

FILES = ("audio", "audio_encoder")  # options that name a file that is read


def add_encoder_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--audio-encoder", help="wav2vec 2.0 encoder of the sound: file or folder (S2V)")


def add_audio_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--audio",
        help="sound that the person of --reference speaks or sings, as long as the video (S2V): WAV, FLAC, MP3, M4A, "
        "OGG, or a video with sound",
    )


def sound_of(audio: str | None) -> Sound | None:
    """Of the file that is written, for the `audio` of a request. Raises OptionError."""
    if audio is None:
        return None
    from wan_core.media.sound import read_sound

    return read_sound(audio)
