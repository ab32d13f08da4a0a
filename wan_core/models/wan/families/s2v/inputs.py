"""What ComfyUI's CONDITIONING is to the transformer of S2V.

Legend: B batch, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from wan_core.config.checks import OptionError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.statistics import normalise
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.family import Inputs, Task
from wan_core.models.wan.families.s2v.config import AUDIO_FRAMES, COMFYUI_POSITIONS
from wan_core.models.wan.families.s2v.model import LEAST_MOTION


def image_inputs(task: Task, vae: VideoVAE, first: Tensor | None, last: Tensor | None, frames: int) -> Inputs:
    raise OptionError(f"{task.name} is driven by a sound and a reference picture, not by a first frame alone")


def read_conditioning(task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]) -> Inputs:
    """The fields of `Conditioning` that ComfyUI's WanSoundImageToVideo and WanSoundImageToVideoExtend give. Raises
    OptionError."""
    samples, inputs = latent["samples"], {}
    T, Y, X = samples.shape[2:]
    if latent.get("noise_mask") is not None:
        raise OptionError(
            f"`latent` has a noise mask, which {task.name} does not take: leave out the node that sets it"
        )
    audio = extras.get("audio_embed")
    if audio is not None:
        if audio.ndim != 4 or audio.shape[3] < AUDIO_FRAMES * T:
            raise OptionError(
                f"audio features of {list(audio.shape)} given; a video of {T} latent frames needs "
                f"{AUDIO_FRAMES * T} frames of them: connect the latent and the conditioning of one node"
            )
        inputs["audio"] = audio[..., : AUDIO_FRAMES * T]
    latents = {
        "reference": (extras.get("reference_latents") or [None])[-1],
        "motion": extras.get("reference_motion"),
        "pose": extras.get("control_video"),
    }
    for name, given in latents.items():
        if given is None:
            continue
        frames = {"reference": 1, "pose": T}.get(name, given.shape[2] if given.ndim == 5 else 0)
        if given.ndim != 5 or given.shape[2:] != (frames, Y, X):
            raise OptionError(
                f"the latents of the {name} are {list(given.shape)}, those of the video {list(samples.shape)}: they do "
                "not belong together"
            )
        inputs[name] = normalise(given, vae)
    if "motion" in inputs and min(Y, X) < LEAST_MOTION:
        raise OptionError(f"motion frames need a video of at least {8 * LEAST_MOTION} pixels in width and height")
    if extras.get(COMFYUI_POSITIONS):
        inputs["comfyui_positions"] = True
    return {"inputs": inputs}
