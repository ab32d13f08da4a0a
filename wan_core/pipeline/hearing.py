"""The encoder of the sound that drives a video: recognised, loaded while it is used.

Legend: N samples, W states of the encoder, n its frames, C their width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from wan_core.checkpoint import detect
from wan_core.checkpoint.load import load_speech
from wan_core.config import OptionError
from wan_core.execution.memory.residency import Residency
from wan_core.execution.report import Report
from wan_core.models.audio.wav2vec2 import SAMPLE_RATE, XLSR_LARGE, SpeechConfig, SpeechEncoder, encoding_bytes
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import Task, family_of

log = logging.getLogger(__name__)


class Speech(NamedTuple):
    """An encoder of sound, which is loaded onto a device while it is used. path: None for random weights."""

    path: Path | None
    load: Callable[[torch.device], SpeechEncoder]
    config: SpeechConfig = XLSR_LARGE


def recognise_speech(path: Path | None, task: Task, dit: DiTConfig) -> Speech | None:
    """The encoder of sound in `path`, by its header; None for a task without sound. Raises OptionError where one is
    missing, not needed or of another size, CheckpointError for a file of another kind."""
    states = family_of(task).speech_states(dit)
    if states is None:
        if path is not None:
            raise OptionError(f"{task.name} takes no sound: remove --audio-encoder")
        return None
    if path is None:
        raise OptionError(
            f"{task.name} needs an encoder of its sound: add --audio-encoder FILE, "
            "wav2vec2_large_english_fp16.safetensors or the folder wav2vec2-large-xlsr-53-english"
        )
    config = cast(SpeechConfig, detect(path, "audio_encoder").config)
    if config.states != states:
        raise OptionError(
            f"the encoder of sound has {config.num_layers} layers, {config.dim} wide; the transformer needs "
            f"{states[0] - 1} layers, {states[1]} wide: not of one model"
        )
    return Speech(path, lambda device: load_speech(path, device=device), config)


def random_speech(task: Task, dit: DiTConfig) -> Speech | None:
    """An encoder of sound with random weights; None for a task that takes no sound."""
    states = family_of(task).speech_states(dit)
    if states is None:
        return None
    count, width = states
    config = SpeechConfig(dim=width, num_layers=count - 1)

    def load(device: torch.device) -> SpeechEncoder:
        with device:
            return SpeechEncoder(config).requires_grad_(False).eval()

    return Speech(None, load, config)


@torch.no_grad()
def hear(speech: Speech, path: str, residency: Residency, report: Report) -> Tensor:
    """The states [W, n, C] of the sound in `path`, float32 on the CPU. Models of `residency` make room for the encoder;
    where its device still has too little memory, the sound is encoded on the CPU."""
    from wan_core.media.sound import mono, read_sound  # imports PyAV: not where no sound is read

    samples = torch.from_numpy(mono(read_sound(path), SAMPLE_RATE))[None]
    with report.phase("encode audio"):
        residency.make_room(encoding_bytes(speech.config, samples.shape[1] / SAMPLE_RATE))
        return encoded(speech, samples, residency.device, report)


def encoded(speech: Speech, samples: Tensor, device: torch.device, report: Report) -> Tensor:
    """Samples [1, N] -> states [W, n, C] on the CPU."""

    def on(where: torch.device) -> Tensor:
        return speech.load(where)(samples.to(where))[0].float().cpu()

    if device.type != "cpu":
        try:
            return on(device)
        except torch.OutOfMemoryError:
            note = "the sound was encoded on the CPU: the device had no memory left for it"
            log.warning("%s", note)
            report.notes.append(note)
        torch.cuda.empty_cache()
    return on(torch.device("cpu"))
