"""What a video hears: the encoder of its sound, and features of the sound for every frame.

Legend: N samples, W states of the encoder, n its frames, C their width, A frames of features.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wan_core.checkpoint import open_checkpoint
from wan_core.checkpoint.speech import find_speech, load_speech
from wan_core.config import OptionError
from wan_core.execution.memory.residency import Residency
from wan_core.execution.report import Report
from wan_core.media.sound import mono, read_sound
from wan_core.models.audio.config import FRAMES_PER_SECOND, SAMPLE_RATE, STRIDES, XLSR_LARGE, SpeechConfig
from wan_core.models.audio.wav2vec2 import SpeechEncoder
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.tasks import Task

log = logging.getLogger(__name__)
CONVOLUTIONS = 4  # tensors as large as the first convolution's output, that are there at the same time
WORKSPACE = 16 * 2**20  # of cuBLAS and cuDNN


class Speech(NamedTuple):
    """An encoder of sound, which is loaded onto a device while it is used. path: None for random weights."""

    path: Path | None
    load: Callable[[torch.device], SpeechEncoder]
    config: SpeechConfig = XLSR_LARGE


def recognise_speech(path: Path | None, task: Task, dit: DiTConfig) -> Speech | None:
    """The encoder of sound in `path`, by its header; None for a task that hears none. Raises OptionError where one is
    missing, not needed or of another size, CheckpointError for a file of another kind."""
    states = family_of(task).speech_states(dit)
    if states is None:
        if path is not None:
            raise OptionError(f"{task.name} hears no sound: leave --audio-encoder out")
        return None
    if path is None:
        raise OptionError(
            f"{task.name} needs an encoder of its sound: add --audio-encoder FILE, "
            "wav2vec2_large_english_fp16.safetensors or the folder wav2vec2-large-xlsr-53-english"
        )
    checkpoint, (count, width) = open_checkpoint(path), states
    config = find_speech(checkpoint)
    if (config.num_layers + 1, config.dim) != (count, width):
        raise OptionError(
            f"the encoder of sound has {config.num_layers} layers, {config.dim} wide; the transformer needs "
            f"{count - 1} layers, {width} wide: not of one model"
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


@lru_cache
def hearing_bytes(config: SpeechConfig, seconds: float) -> int:
    """What encoding a sound takes of the device's memory, all in float32: weights, the samples and a copy with mean 0
    and variance 1, and the first convolution with its norm and activation, or the states of all layers and their
    stack."""
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in SpeechEncoder(config).parameters())
    samples, frames = seconds * SAMPLE_RATE, seconds * FRAMES_PER_SECOND
    first = CONVOLUTIONS * config.conv_dim * samples / STRIDES[0]
    states = frames * (2 * (config.num_layers + 1) * config.dim + 2 * config.ffn_dim)
    return int(4 * (weights + 2 * samples + max(first, states))) + WORKSPACE


@torch.no_grad()
def heard(speech: Speech, task: Task, path: str, clip: Clip, residency: Residency, report: Report) -> Tensor:
    """Features of the sound in `path` [1, W, C, A] for all frames up to the end of the last `clip`, float32 on the CPU.
    Models of `residency` make room for it; where its device still has too little, the sound is encoded on the CPU."""
    samples = torch.from_numpy(mono(read_sound(path), SAMPLE_RATE))[None]
    with report.phase("encode audio"):
        residency.make_room(hearing_bytes(speech.config, samples.shape[1] / SAMPLE_RATE))
        states = encoded(speech, samples, residency.device, report)
        return family_of(task).sound_features(states, clip)


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
