"""What ComfyUI's CONDITIONING is to the transformer of Animate.

Legend: B batch, T/Y/X latent frames, rows, columns, F face frames.
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
from wan_core.models.wan.families.wan.inputs import read_conditioning as read_image_conditioning


def image_inputs(task: Task, vae: VideoVAE, first: Tensor | None, last: Tensor | None, frames: int) -> Inputs:
    raise OptionError(f"{task.name} is driven by videos, not by a first frame alone")


def read_conditioning(task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]) -> Inputs:
    """The fields of `Conditioning` that ComfyUI's WanAnimateToVideo gives. Raises OptionError.

    The reference and known frames are channels beside the noise, as of image-to-video; their first latent frame is the
    reference.
    """
    found = read_image_conditioning(task, vae, extras, latent)
    pose, face = extras.get("pose_video_latent"), extras.get("face_video_pixels")
    samples, inputs = latent["samples"], {}
    if pose is not None:
        wanted = (samples.shape[2] - 1, *samples.shape[3:])
        if pose.shape[2:] != wanted:
            raise OptionError(
                f"the pose's latents are {list(pose.shape)}, the video's {list(samples.shape)}: not one size"
            )
        inputs["pose"] = normalise(pose, vae)
    if face is not None:
        inputs["face"] = face.float()
    return {**found, "inputs": inputs}
