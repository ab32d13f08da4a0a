"""What ComfyUI's CONDITIONING, or the media of a clip, are to the transformer of Animate.

Legend: B batch, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.family import Inputs
from wan_core.models.wan.families.task import Task
from wan_core.models.wan.families.wan.inputs import check_one_size, join_image, mask_channels
from wan_core.models.wan.families.wan.inputs import read_conditioning as read_image_conditioning


def read_conditioning(task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]) -> Inputs:
    """The fields of `Conditioning` that ComfyUI's WanAnimateToVideo gives. Raises OptionError.

    The reference and known frames are channels beside the noise, as of image-to-video; their first latent frame is the
    reference.
    """
    fields = read_image_conditioning(task, vae, extras, latent, "WanCore Animate")
    pose, face = extras.get("pose_video_latent"), extras.get("face_video_pixels")
    samples, inputs = latent["samples"], {}
    if pose is not None:
        check_one_size(pose, samples, "pose", missing=1)
        inputs["pose"] = vae.normalise(pose)
    if face is not None:
        inputs["face"] = face.float()
    return {**fields, "inputs": inputs}


def clip_inputs(
    task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
) -> Inputs:
    """The fields of `Conditioning` that the media of a clip give. Source: Wan2.2/wan/animate.py."""
    inputs = {"pose": vae.normalise(vae.encode(media["pose_video"]))}
    without = {}
    if "face_video" in media:
        inputs["face"] = media["face_video"].float()
        without = {"face": torch.full_like(inputs["face"], -1)}
    concat = join_image(*reference_and_clip(vae.encode, media, clip, vae.config), vae.config)
    return {"concat": concat, "image_features": seen["reference"], "inputs": inputs, "uncond_inputs": without}


def reference_and_clip(
    encode: Callable[[Tensor], Tensor], media: Mapping[str, Tensor], clip: Clip, vae: VAEConfig
) -> tuple[Tensor, Tensor]:
    """Un-normalised latents [1, C, 1 + T, Y, X] of the reference and then of a clip, and the mask of what is unknown in
    them [1, 4, 1 + T, Y, X]. encode: [1, 3, F, H, W] in -1..1 -> latents."""
    video, unknown = known_clip(media, clip, vae.spatial_stride)
    reference, clip_latents = encode(media["reference"]), encode(video)
    mask = mask_channels(unknown).to(clip_latents)
    return torch.cat([reference, clip_latents], 2), torch.cat([torch.zeros_like(mask[:, :, :1]), mask], 2)


def comfy_extras(
    encode: Callable[[Tensor], Tensor], media: Mapping[str, Tensor], clip: Clip, vae: VAEConfig
) -> dict[str, Tensor]:
    """The media of a clip of Animate or Animate-2 as CONDITIONING carries them. encode: as of `reference_and_clip`."""
    image, unknown = reference_and_clip(encode, media, clip, vae)
    extras = {"concat_latent_image": image, "concat_mask": unknown, "pose_video_latent": encode(media["pose_video"])}
    return extras | ({"face_video_pixels": media["face_video"]} if "face_video" in media else {})


def known_clip(media: Mapping[str, Tensor], clip: Clip, stride: int) -> tuple[Tensor, Tensor]:
    """What is known of a clip: its frames [1, 3, F, H, W] in -1..1, and how far each is unknown [F, Y, X]. All of it is
    grey and unknown but the last frames of the clip before, and what is not the person in `background`."""
    like = media["reference"]
    video = media["background"].clone() if "background" in media else like.new_zeros(1, 3, clip.frames, *like.shape[3:])
    size = [side // stride for side in like.shape[3:]]
    unknown = like.new_ones(clip.frames, *size)
    if "mask" in media:
        person = (media["mask"][0, :1] + 1) / 2  # [1, F, H, W]
        unknown = F.interpolate(person.transpose(0, 1), size, mode="nearest")[:, 0]
    if "carried" in media:
        video[:, :, : clip.carried] = media["carried"]
        unknown[: clip.carried] = 0
    return video, unknown
