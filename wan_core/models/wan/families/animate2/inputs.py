"""What ComfyUI's CONDITIONING, or the media of a clip, are to the transformer of Animate-2.

Legend: B batch, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.animate.inputs import reference_and_clip
from wan_core.models.wan.families.animate2 import DISTILLED, DISTILLED_LOG_SCALE
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.family import Inputs
from wan_core.models.wan.families.task import Task
from wan_core.models.wan.families.wan.inputs import check_one_size, join_image, read_features
from wan_core.models.wan.families.wan.inputs import read_conditioning as read_image_conditioning


def read_conditioning(task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]) -> Inputs:
    """The fields of `Conditioning` that ComfyUI's WanAnimate2ToVideo gives. Raises OptionError.

    As in the reference and unlike ComfyUI's own sampling, distilled weights have their scale, and the branch of the
    negative prompt leaves a block out.
    """
    fields = read_image_conditioning(task, vae, extras, latent, "WanCore Animate 2")
    inputs = {"unconditional": False, "log_scale": log_scale(task)}
    for name in ("pose_strength", "reference_strength"):
        inputs[name] = 1.0 if extras.get(name) is None else float(extras[name])
    if extras.get("pose_video_latent") is not None:
        check_one_size(extras["pose_video_latent"], latent["samples"], "driving video", missing=1)
        inputs["pose"] = driving_channels(vae.normalise(extras["pose_video_latent"]))
    if extras.get("clip_vision_output_pose") is not None:
        inputs["pose_image"] = read_features(task, extras["clip_vision_output_pose"])
    if extras.get("cross_attn_pose") is not None:
        inputs["pose_context"] = extras["cross_attn_pose"]
    return {**fields, "inputs": inputs, "uncond_inputs": {"unconditional": True}}


def clip_inputs(
    task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
) -> Inputs:
    """The fields of `Conditioning` that the media of a clip give. Source: LightX2V's Animate-2."""
    inputs = {
        "unconditional": False,
        "log_scale": log_scale(task),
        "pose": driving_channels(vae.normalise(vae.encode(media["pose_video"]))),
        "pose_image": seen["pose_video"],
    }
    return {
        "concat": join_image(*reference_and_clip(vae.encode, media, clip, vae.config), vae.config),
        "image_features": seen["reference"],
        "inputs": inputs,
        "uncond_inputs": {"unconditional": True},
    }


def log_scale(task: Task) -> float:
    return DISTILLED_LOG_SCALE if task.name == DISTILLED.name else 0.0


def driving_channels(latents: Tensor) -> Tensor:
    """Normalised latents [B, C, T - 1, Y, X] of a driving video -> its channels [B, C + 4 + C, T - 1, Y, X]: all of its
    frames are known."""
    return torch.cat([latents, torch.ones_like(latents[:, :4]), latents], 1)
