"""What ComfyUI's CONDITIONING is to the transformer of VACE.

Legend: B batch, N control videos, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wan_core.config.checks import OptionError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.statistics import normalise
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.family import Inputs, Task
from wan_core.models.wan.families.wan.inputs import read_conditioning as read_image_conditioning

MASK_CHANNELS = 64  # the mask of a latent frame: 8 x 8 pixels of each latent


def image_inputs(task: Task, vae: VideoVAE, first: Tensor | None, last: Tensor | None, frames: int) -> Inputs:
    raise OptionError(f"{task.name} is driven by videos, not by a first frame alone")


def read_conditioning(task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]) -> Inputs:
    """The fields of `Conditioning` that ComfyUI's WanVaceToVideo gives, once or chained. Raises OptionError.

    Without it everything is to be generated, as ComfyUI samples it.
    """
    found = read_image_conditioning(task, vae, extras, latent)
    samples = latent["samples"]
    frames = extras.get("vace_frames") or [torch.zeros_like(samples[:1]).repeat(1, 2, 1, 1, 1)]
    masks = extras.get("vace_mask") or [torch.ones_like(one[:, :1]).repeat(1, MASK_CHANNELS, 1, 1, 1) for one in frames]
    scales = extras.get("vace_strength") or [1.0] * len(frames)
    if not len(frames) == len(masks) == len(scales):
        raise OptionError(
            f"{len(frames)} control videos, {len(masks)} masks and {len(scales)} strengths given: one of each is needed"
        )
    control = [control_channels(*one, samples, vae) for one in zip(frames, masks, strict=True)]
    rows = max(map(len, control))
    stacked = torch.stack([one.expand(rows, -1, -1, -1, -1) for one in control], 1)
    return {**found, "inputs": {"control": stacked, "control_scale": torch.tensor(scales, dtype=torch.float32)}}


def control_channels(frames: Tensor, mask: Tensor, samples: Tensor, vae: VAEConfig) -> Tensor:
    """Un-normalised latents [1 or B, 32, T, Y, X] of what stays and what changes, and their mask [1 or B, 64, T, Y, X],
    for latents [B, 16, T, Y, X] -> [1 or B, 96, T, Y, X]. Raises OptionError."""
    size = samples.shape[2:]
    wanted = (2 * vae.z_dim, *size), (MASK_CHANNELS, *size)
    if (frames.shape[1:], mask.shape[1:]) != wanted or any(len(x) not in (1, len(samples)) for x in (frames, mask)):
        raise OptionError(
            f"a control video of {list(frames.shape)} with a mask of {list(mask.shape)} given for latents of "
            f"{list(samples.shape)}: {list(wanted[0])} and {list(wanted[1])} are needed. Connect the LATENT of the "
            "WanVaceToVideo node; chained nodes need the same size, and a reference picture in all of them or in none"
        )
    rows = max(len(frames), len(mask))
    parts = [normalise(part, vae) for part in frames.split(vae.z_dim, 1)]
    return torch.cat([x.float().expand(rows, -1, -1, -1, -1) for x in (*parts, mask.to(frames.device))], 1)
