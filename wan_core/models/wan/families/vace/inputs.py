"""What ComfyUI's CONDITIONING, or the media of a clip, are to the transformer of VACE.

Legend: B batch, N control videos, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config import OptionError, Request
from wan_core.media.fit import Pixels, fit_covering
from wan_core.media.video import video_facts
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.family import Inputs
from wan_core.models.wan.families.media import WHITE, keyframes_of, read_fitted, read_picture
from wan_core.models.wan.families.task import Task
from wan_core.models.wan.families.vace import is_picture
from wan_core.models.wan.families.wan.inputs import read_conditioning as read_image_conditioning

GREY = 127
MASK_CHANNELS = 64  # the mask of a latent frame: 8 x 8 pixels of each latent


def mask_of(request: Request, size: tuple[int, int], fps: int, frames: int) -> Pixels:
    """The mask of what changes, uint8 [F, H, W, 3] fitted to `size` (width, height): the request's, the border that it
    asks for, or all. The border is in pixels of the control video, which a mask may be smaller than."""
    path = request.control_video
    inner = None if request.outpaint is None or path is None else video_facts(path)[:2]

    def fit(frame: Pixels) -> Pixels:
        frame = frame if inner is None else fit_covering(frame, inner)
        return fit_covering(padded(frame, request.outpaint, WHITE), size)

    if request.mask is not None and is_picture(request.mask):
        return fit(read_picture(request.mask))[None]
    if request.mask is not None:
        return read_fitted(request.mask, fps, frames, size, fit)
    if inner is not None:
        return fit(np.zeros((*inner[::-1], 3), np.uint8))[None]
    return np.full((1, size[1], size[0], 3), WHITE, np.uint8)


def padded(frame: Pixels, outpaint: tuple[int, int, int, int] | None, border: int) -> Pixels:
    """[H, W, 3] with so many pixels of the grey value `border` to the left, top, right and bottom."""
    left, top, right, bottom = outpaint or (0, 0, 0, 0)
    return np.pad(frame, ((top, bottom), (left, right), (0, 0)), constant_values=border)


def read_conditioning(task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]) -> Inputs:
    """The fields of `Conditioning` that ComfyUI's WanVaceToVideo gives, once or chained. Raises OptionError.

    Without it everything is to be generated, as ComfyUI samples it. That is what the negative prompt has, too, where
    the positive one alone is controlled.
    """
    fields = read_image_conditioning(task, vae, extras, latent)
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
    return {**fields, "inputs": {"control": stacked, "control_scale": torch.tensor([scales], dtype=torch.float32)}}


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
    parts = [vae.normalise(part) for part in frames.split(vae.z_dim, 1)]
    return torch.cat([x.float().expand(rows, -1, -1, -1, -1) for x in (*parts, mask.to(frames.device))], 1)


def clip_inputs(
    task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
) -> Inputs:
    """The fields of `Conditioning` that the media of a clip give."""
    frames, mask = control_of_media(vae.encode, media, clip, vae.config)
    return {"inputs": {"control": control_channels(frames, mask, frames, vae.config)}}


def control_of_media(
    encode: Callable[[Tensor], Tensor], media: Mapping[str, Tensor], clip: Clip, vae: VAEConfig
) -> tuple[Tensor, Tensor]:
    """Un-normalised latents [1, 32, T, Y, X] of what stays and what changes, and their mask [1, 64, T, Y, X], as
    ComfyUI's CONDITIONING carries them. A latent frame of each reference picture is in front.

    encode: [1, 3, F, H, W] in -1..1 -> latents. media: `mask` of what changes; `control_video`, grey where there is
    none; the known frames `image`, `last_image`, `carried` and those of `keyframes_of`; `reference` pictures [N, 3, 1,
    H, W]. Source: VACE/vace/models/wan/wan_vace.py.
    """
    changes = (media["mask"][0, 0] >= 0).to(media["mask"].dtype)  # [F, H, W]
    video = media["control_video"].clone() if "control_video" in media else torch.zeros_like(media["mask"])
    for name in ("image", "carried", "last_image"):
        if name in media:
            count = media[name].shape[2]
            known = slice(clip.frames - count, None) if name == "last_image" else slice(count)
            video[:, :, known], changes[known] = media[name], 0
    for frame, picture in keyframes_of(media).items():
        video[:, :, frame], changes[frame] = picture[:, :, 0], 0
    latents = torch.cat([encode(video * (1 - changes)), encode(video * changes)], 1)
    mask = mask_channels(changes, latents.shape[2], vae.spatial_stride)[None]
    references = [encode(picture[None]) for picture in media.get("reference", ())]
    nothing = [vae.denormalise(torch.zeros_like(one)) for one in references]
    front = [torch.cat(pair, 1) for pair in zip(references, nothing, strict=True)]
    stays = mask.new_zeros(1, MASK_CHANNELS, len(front), *mask.shape[3:])
    return torch.cat([*front, latents], 2), torch.cat([stays, mask], 2)


def mask_channels(changes: Tensor, frames: int, stride: int) -> Tensor:
    """A mask of frames [F, H, W] as that of latents [64, T, Y, X]: the pixels of a latent are its channels."""
    blocks = changes.unflatten(2, (-1, stride)).unflatten(1, (-1, stride))  # [F, Y, 8, X, 8]
    blocks = blocks.permute(2, 4, 0, 1, 3).flatten(0, 1)
    return F.interpolate(blocks[None], size=(frames, *blocks.shape[2:]), mode="nearest-exact")[0]


def comfy_extras(
    encode: Callable[[Tensor], Tensor], media: Mapping[str, Tensor], clip: Clip, vae: VAEConfig
) -> dict[str, Tensor]:
    """The media of a clip as CONDITIONING carries them, one of each list. encode, media: as of `control_of_media`."""
    return dict(zip(("vace_frames", "vace_mask"), control_of_media(encode, media, clip, vae), strict=True))
