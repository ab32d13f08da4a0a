"""The sound that drives a video, encoded: its encoder is loaded while it is used.

Legend: N samples, W states of the encoder, n its frames, C their width.
"""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import Tensor

from wan_core.execution.memory.residency import Residency
from wan_core.execution.report import Report
from wan_core.models.audio.wav2vec2 import SAMPLE_RATE, SpeechConfig, encoding_bytes
from wan_core.pipeline.model_parts import Part

log = logging.getLogger(__name__)


@torch.no_grad()
def hear(speech: Part, path: str, residency: Residency, report: Report) -> Tensor:
    """The states [W, n, C] of the sound in `path`, float32 on the CPU. Models of `residency` make room for the encoder;
    where its device still has too little memory, the sound is encoded on the CPU."""
    from wan_core.media.sound import mono, read_sound  # imports PyAV: not where no sound is read

    samples = torch.from_numpy(mono(read_sound(path), SAMPLE_RATE))[None]
    with report.phase("encode audio"):
        residency.make_room(encoding_bytes(cast(SpeechConfig, speech.config), samples.shape[1] / SAMPLE_RATE))
        return encoded(speech, samples, residency.device, report)


def encoded(speech: Part, samples: Tensor, device: torch.device, report: Report) -> Tensor:
    """Samples [1, N] -> states [W, n, C] on the CPU."""

    def on(where: torch.device) -> Tensor:
        return speech.load(where, torch.float32, None)(samples.to(where))[0].float().cpu()

    if device.type != "cpu":
        try:
            return on(device)
        except torch.OutOfMemoryError:
            note = "the sound was encoded on the CPU: the device had no memory left for it"
            log.warning("%s", note)
            report.notes.append(note)
        torch.cuda.empty_cache()
    return on(torch.device("cpu"))
