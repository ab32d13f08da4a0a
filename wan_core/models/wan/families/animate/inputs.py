"""What ComfyUI's CONDITIONING, or the media of a clip, are to the transformer of Animate.

Legend: B batch, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config.checks import OptionError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.statistics import normalise
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.family import Inputs, Task
from wan_core.models.wan.families.wan.inputs import continued_channels, join_image
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


def clip_inputs(
    task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
) -> Inputs:
    """The fields of `Conditioning` that the media of a clip give. Source: Wan2.2/wan/animate.py."""
    known = None
    if "mask" in media:
        size = [side // vae.config.spatial_stride for side in media["mask"].shape[-2:]]
        person = (media["mask"][0, 0] + 1) / 2  # [F, H, W], 1 where the person is
        known = 1 - F.interpolate(person[:, None], size, mode="nearest")[:, 0]
    concat = reference_and_clip(vae, media, clip, media.get("background"), known)
    inputs = {"pose": vae.normalise(vae.encode(media["pose_video"]))}
    without = {}
    if "face_video" in media:
        inputs["face"] = media["face_video"].float()
        without = {"face": torch.full_like(inputs["face"], -1)}
    return {"concat": concat, "image_features": seen["reference"], "inputs": inputs, "uncond_inputs": without}


def reference_and_clip(
    vae: VideoVAE, media: Mapping[str, Tensor], clip: Clip, video: Tensor | None = None, known: Tensor | None = None
) -> Tensor:
    """Channels beside the noise [1, 4 + C, 1 + T, Y, X], float32: the reference picture, then a clip.

    video: the clip [1, 3, F, H, W], where it is not all unknown. known: how far each pixel is, [F, Y, X].
    """
    picture = media["reference"]
    reference = vae.encode(picture)
    unknown = torch.zeros_like(reference[:, :1])
    return torch.cat(
        [join_image(reference, unknown, vae.config), continued_channels(vae, picture, media, clip, video, known)], 2
    )
