"""What ComfyUI's CONDITIONING, or the media of a clip, are to the transformers of Fun.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wan_core.config.checks import OptionError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.config import IMAGE_TOKENS
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.family import Inputs
from wan_core.models.wan.families.fun import FunCameraConfig
from wan_core.models.wan.families.task import Task
from wan_core.models.wan.families.wan.inputs import (
    frame_mask,
    image_channels,
    join_image,
    known_first,
    read_features,
)

Extras = Mapping[str, Any]


def read_control(task: Task, vae: VAEConfig, extras: Extras, latent: Extras) -> Inputs:
    """The fields of `Conditioning` of Wan22FunControlToVideo, for 2.1 WanFunControlToVideo. Raises OptionError."""
    samples, image = latent["samples"], extras.get("concat_latent_image")
    if image is None:
        raise OptionError(f"{task.name} follows a control video: connect {task.driven_by}")
    check_size(image, 2 * vae.z_dim, samples)
    control, start = image.split(vae.z_dim, 1)
    if task.in_channels == 3 * vae.z_dim:
        known = vae.normalise(start)
    else:
        if extras.get("concat_mask_index") != vae.z_dim or extras.get("concat_mask") is None:
            raise OptionError(f"{task.name} takes a mask of what is known after the control video: connect "
                              f"{task.driven_by}, not the node of Wan 2.1")  # fmt: skip
        known = join_image(start, extras["concat_mask"], vae)
    fields = {"concat": torch.cat([vae.normalise(control), known], 1), **shared(task, vae, extras, latent)}
    references = extras.get("reference_latents")
    if not references:
        return fields
    if len(references) > 1:
        raise OptionError(f"{len(references)} reference pictures given; {task.name} takes one")
    check_size(references[0], vae.z_dim, samples[:, :, : references[0].shape[2]])
    return {**fields, "inputs": {"reference": vae.normalise(references[0][:, :, 0])}}


def read_camera(task: Task, vae: VAEConfig, extras: Extras, latent: Extras) -> Inputs:
    """The fields of `Conditioning` that ComfyUI's WanCameraImageToVideo gives. Without a start the channels beside the
    noise are zeros, as ComfyUI samples it. Raises OptionError."""
    samples, image = latent["samples"], extras.get("concat_latent_image")
    beside = task.in_channels - vae.z_dim
    if image is None:
        concat = torch.zeros_like(samples[:1, :1]).repeat(1, beside, 1, 1, 1)
    else:
        check_size(image, vae.z_dim, samples)
        mask = extras.get("concat_mask")
        mask = torch.ones_like(image[:, :1]) if mask is None else mask
        concat = vae.normalise(image) if beside == vae.z_dim else join_image(image, mask, vae)
    fields = {"concat": concat, **shared(task, vae, extras, latent)}
    camera = extras.get("camera_conditions")
    if camera is None:
        return fields
    wanted = (
        FunCameraConfig.camera_channels,
        samples.shape[2],
        *(vae.spatial_stride * size for size in samples.shape[3:]),
    )
    if camera.ndim != 5 or camera.shape[1:] != wanted:
        raise OptionError(
            f"a camera of {list(camera.shape)} given for latents of {list(samples.shape)}: its channels, frames, "
            f"height and width must be {list(wanted)}. Give WanCameraEmbedding the size and length of the video"
        )
    return {**fields, "inputs": {"camera": camera.float()}}


def shared(task: Task, vae: VAEConfig, extras: Extras, latent: Extras) -> Inputs:
    """CLIP features, where the task needs them. Raises OptionError for known frames as latents."""
    if "noise_mask" in latent and known_first(latent["samples"], latent["noise_mask"], vae) is not None:
        raise OptionError(f"{task.name} takes no known frame as latents: connect {task.driven_by}")
    if task.image_dim is None:
        return {}
    return {"image_features": read_features(task, extras.get("clip_vision_output"))}


def check_size(latents: Tensor, channels: int, samples: Tensor) -> None:
    """Raise OptionError unless `latents` are [1 or B, channels, T, Y, X] of the size of `samples`."""
    wanted = channels, *samples.shape[2:]
    if latents.ndim != 5 or latents.shape[1:] != wanted or len(latents) not in (1, len(samples)):
        raise OptionError(
            f"latents of {list(latents.shape)} given beside a video of {list(samples.shape)}; needed are [1 or batch, "
            f"{', '.join(map(str, wanted))}]: connect the LATENT of the node that made them"
        )


def control_inputs(
    task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
) -> Inputs:
    """The fields of `Conditioning` of a clip of Fun control. Source: VideoX-Fun's pipeline_wan2_2_fun_control.py."""
    control = vae.normalise(vae.encode(media["control_video"]))
    masked = task.in_channels > 3 * vae.config.z_dim
    fields: Inputs = {"concat": torch.cat([control, start_channels(vae, media, control, masked=masked)], 1)}
    fields |= {} if task.image_dim is None else {"image_features": features_of(task, seen, control)}
    if "reference" in media:
        fields["inputs"] = {"reference": vae.normalise(vae.encode(media["reference"]))[:, :, 0]}
    return fields


def camera_inputs(
    task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
) -> Inputs:
    """The fields of `Conditioning` of a clip of Fun camera. Source: VideoX-Fun's pipeline_wan2_2_fun_control.py."""
    rays, first = media["camera"], media.get("carried", media.get("image"))
    stride = vae.config.spatial_stride
    like = rays.new_zeros(1, vae.config.z_dim, rays.shape[2], rays.shape[3] // stride, rays.shape[4] // stride)
    masked = task.in_channels > 2 * vae.config.z_dim
    if masked and first is not None:
        concat = image_channels(vae, first, None, clip.frames)
    else:
        concat = start_channels(vae, media, like, masked=masked)
    fields = {"concat": concat, "inputs": {"camera": rays}}
    return fields if task.image_dim is None else {**fields, "image_features": features_of(task, seen, like)}


def start_channels(vae: VideoVAE, media: Mapping[str, Tensor], like: Tensor, *, masked: bool) -> Tensor:
    """Channels [1, 16 or 20, T, Y, X] of the first frames, where some are known, and of zeros; `masked`: with a mask of
    what is known in front. like: latents [1, 16, T, Y, X]."""
    start, known = torch.zeros_like(like), torch.zeros_like(like[:, :4])
    first = media.get("carried", media.get("image"))
    if first is not None:
        latents = vae.normalise(vae.encode(first))
        start[:, :, : latents.shape[2]] = latents
        unknown = torch.ones(4 * (like.shape[2] - 1) + 1, device=like.device)
        unknown[: first.shape[2]] = 0
        known = 1 - frame_mask(unknown, like)
    return torch.cat([known, start], 1) if masked else start


def features_of(task: Task, seen: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """CLIP features of what the clip begins with; zeros where that is not known."""
    assert task.image_dim is not None
    return seen["image"] if "image" in seen else like.new_zeros(1, IMAGE_TOKENS, task.image_dim)
