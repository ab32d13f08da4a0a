"""What known frames are to the transformer: channels beside the noise, or a first latent frame that stays.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.

Source: Wan2.2/wan/image2video.py, textimage2video.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config import OptionError, check_known
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.clips import Clip, frames_of_latents
from wan_core.models.wan.families.family import Inputs
from wan_core.models.wan.families.media import keyframes_of
from wan_core.models.wan.families.task import Task

NO_KEYFRAMES: Mapping[int, Tensor] = MappingProxyType({})


def read_conditioning(
    task: Task,
    vae: VAEConfig,
    extras: Mapping[str, Any],
    latent: Mapping[str, Any],
    node: str = "WanCore Image to Video",
) -> Inputs:
    """The fields of `Conditioning` of ComfyUI's CONDITIONING (`extras`) and LATENT. node: which gives them. Raises
    OptionError."""
    samples, fields = latent["samples"], {}
    image, unknown = extras.get("concat_latent_image"), extras.get("concat_mask")
    if task.image == "channels":
        if image is None:
            raise OptionError(f"{task.name} turns an image into a video: connect {node}")
        check_one_size(image, samples, "image")
        fields["concat"] = join_image(image, torch.ones_like(image[:, :1]) if unknown is None else unknown, vae)
    elif image is not None:
        raise OptionError(f"{task.name} takes no image: load an image-to-video model, or leave the image out")
    if task.image_dim is not None:
        fields["image_features"] = read_features(task, extras.get("clip_vision_output"))
    if "noise_mask" in latent:
        known = known_first(samples, latent["noise_mask"], vae)
        if known is not None and task.image != "first frame":
            raise OptionError(f"{task.name} takes no known frame as latents: use WanCore Image to Video")
        if known is not None:
            fields["known"] = known
    return fields


def check_one_size(latents: Tensor, samples: Tensor, name: str, missing: int = 0) -> None:
    """Raise OptionError unless latents are as large as the video's `samples`, with so many frames `missing`."""
    if latents.shape[2:] != (samples.shape[2] - missing, *samples.shape[3:]):
        raise OptionError(
            f"the {name}'s latents are {list(latents.shape)}, the video's {list(samples.shape)}: not one size"
        )


def read_features(task: Task, output: Any) -> Tensor:
    """CLIP features [1 or B, N, image_dim] of ComfyUI's CLIP_VISION_OUTPUT. Raises OptionError."""
    if output is None:
        raise OptionError(
            f"{task.name} needs CLIP features of the image: load clip_vision_h.safetensors with CLIPVisionLoader, "
            "encode the image with CLIPVisionEncode (crop none), and connect that to clip_vision_output of WanCore "
            "Image to Video"
        )
    features = output.penultimate_hidden_states
    if features.ndim != 3 or features.shape[-1] != task.image_dim:
        raise OptionError(
            f"CLIP features of {list(features.shape)} given; {task.name} takes {task.image_dim} channels, those of "
            "clip_vision_h.safetensors"
        )
    return features.float()


def image_channels(
    vae: VideoVAE,
    first: Tensor | None,
    last: Tensor | None,
    frames: int,
    keyframes: Mapping[int, Tensor] = NO_KEYFRAMES,
) -> Tensor:
    """The 4 mask and C image channels of I2V: [1, 4 + C, T, Y, X], float32, normalised; see `known_frames`."""
    video, unknown = known_frames(first, last, frames, keyframes)
    latents = vae.encode(video)
    return join_image(latents, frame_mask(unknown, latents), vae.config)


def known_frames(
    first: Tensor | None, last: Tensor | None, frames: int, keyframes: Mapping[int, Tensor] = NO_KEYFRAMES
) -> tuple[Tensor, Tensor]:
    """A clip [1, 3, F, H, W] of which some frames are known, and which are not [F] (1: unknown).

    first, last: known frames at the beginning and the end, [1, 3, N, H, W] in -1..1, either may be None. keyframes: by
    their place, [1, 3, 1, H, W] each. The unknown frames between are grey (0): so the model was trained. Raises
    OptionError where nothing is known, one frame twice, and more than there are frames.
    """
    pictures = [*(image for image in (first, last) if image is not None), *keyframes.values()]
    if not pictures:
        raise OptionError("image conditioning needs a first frame, a last frame or both; none was given")
    video = pictures[0].new_zeros(1, 3, frames, *pictures[0].shape[-2:])
    unknown = video.new_ones(frames)
    known = sum(image.shape[2] for image in pictures)
    if known > frames:
        raise OptionError(f"{known} known frames given for a video of {frames}: give fewer, or make a longer video")
    if first is not None:
        video[:, :, : first.shape[2]] = first
        unknown[: first.shape[2]] = 0
    if last is not None:
        video[:, :, -last.shape[2] :] = last
        unknown[-last.shape[2] :] = 0
    if keyframes:
        check_known([*(int(place) for place in (unknown == 0).nonzero()), *keyframes], frames)
    for place, picture in keyframes.items():
        video[:, :, place : place + 1] = picture
        unknown[place] = 0
    return video, unknown


def known_of(unknown: Tensor) -> tuple[int, ...]:
    """The video frames that are known by a mask of latents, as ComfyUI's CONDITIONING carries it: [1 or B, 1 or 4, T,
    Y, X]. The first frame is four channels, as in `mask_channels`."""
    each = (unknown[0].float().mean((-2, -1)) < 0.5).expand(4, -1).T.flatten()[3:]  # [F]
    return tuple(int(place) for place in each.nonzero())


def handed_of(latents: Tensor, unknown: Tensor, config: VAEConfig) -> tuple[int, ...]:
    """The video frames whose image latents [1 or B, C, T, Y, X] are those of the clip before, as `svi_clip` joins them:
    neither known nor padding; none where there is no padding."""
    known = set(known_of(unknown))
    filled = config.normalise(latents[:1]).abs().amax((0, 1, 3, 4)) > 1e-3
    places = [int(place) for place in filled.nonzero() if place > 0]
    return () if bool(filled.all()) else tuple(one for one in frames_of_latents(places) if one not in known)


def clip_inputs(
    task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
) -> Inputs:
    """The fields of `Conditioning` of one clip of a long video: it begins with the image, with the last frames of the
    clip before, or with an anchor and the last latents of it."""
    if "anchor" in media:
        last = vae.encode(media["last_image"]).float() if "last_image" in media else None
        anchor = vae.encode(media["anchor"]).float()
        latents, unknown = svi_clip(anchor, last, media.get("previous"), clip.frames, vae.config)
        return {"concat": join_image(latents, unknown, vae.config)}
    first, features = media.get("carried", media.get("image")), {"image_features": seen.get("image")}
    if task.image == "channels":
        known = first, media.get("last_image"), clip.frames, keyframes_of(media)
        return {"concat": image_channels(vae, *known), **features}
    assert task.image == "first frame" and first is not None
    return {"known": vae.normalise(vae.encode(first)), **features}  # the first latent frames: [1, C, K, Y, X]


def svi_clip(
    anchor: Tensor, last: Tensor | None, previous: Tensor | None, frames: int, config: VAEConfig
) -> tuple[Tensor, Tensor]:
    """Un-normalised latents of a clip [1, C, T, Y, X]: the anchor's, the `previous` ones of the clip before, padding
    that is zero when normalised, and in the place of the last one that of the `last` picture. The mask of what is
    unknown [1, 4, T, Y, X]: all but the first, and the last frame where it is given. anchor, last: [1, C, 1, Y, X].

    Raises OptionError where nothing of the clip remains to be made. Source: WanImageToVideoSVIPro of ComfyUI-KJNodes;
    models/wan/any2video.py of Wan2GP for the last frame.
    """
    if previous is not None:
        anchor = anchor.expand(previous.shape[0], -1, -1, -1, -1)
    given = [anchor] if previous is None else [anchor, previous.to(anchor)]
    count, T = sum(one.shape[2] for one in given), config.latent_frames(frames)
    if count + (last is not None) >= T:
        raise OptionError(
            f"{count} latents given for a clip of {frames} frames, which has {T}: make it longer, or hand fewer on"
        )
    zeros = anchor.new_zeros(*anchor.shape[:2], T - count, *anchor.shape[3:])
    latents = torch.cat([*given, config.denormalise(zeros)], 2)
    unknown = anchor.new_ones(1, 4, T, *anchor.shape[3:])
    unknown[:, :, 0] = 0
    if last is not None:
        latents[:, :, -1:] = last
        unknown[:, -1, -1] = 0
    return latents, unknown


def frame_mask(unknown: Tensor, latents: Tensor) -> Tensor:
    """Which video frames are unknown, [F], as a mask [1, 4, T, Y, X] for their latents.

    A latent frame holds four video frames, so it has four mask channels (the first, alone, repeats).
    """
    return mask_channels(unknown[:, None, None].expand(-1, *latents.shape[-2:])).to(latents)


def mask_channels(frames: Tensor) -> Tensor:
    """A mask of video frames [F, Y, X] as that of their latents [1, 4, T, Y, X]."""
    return torch.cat([frames[:1].expand(4, -1, -1), frames[1:]]).unflatten(0, (-1, 4)).transpose(0, 1)[None]


def join_image(latents: Tensor, unknown: Tensor, config: VAEConfig) -> Tensor:
    """Un-normalised latents of a clip and the mask of what is unknown in it, as ComfyUI's conditioning carries them, as
    channels for the transformer: [1 or B, 4 + C, T, Y, X], float32, normalised.

    unknown: [1 or B, 1 or 4, up to T, Y, X]; one channel stands for all four, frames that are left out are unknown. In
    the transformer the mask is 1 where a frame is known. Raises OptionError.
    """
    B, C, T, Y, X = latents.shape
    if config.z_dim != C or unknown.ndim != 5 or unknown.shape[1] not in (1, 4) or unknown.shape[-2:] != (Y, X):
        raise OptionError(
            f"image conditioning of {list(latents.shape)} with a mask of {list(unknown.shape)} given; needed are "
            f"latents [batch, {config.z_dim}, frames, rows, columns] and a mask [batch, 1 or 4, frames, rows, columns]"
        )
    known = 1 - unknown.float().expand(B, 4, -1, -1, -1)[:, :, :T]
    known = F.pad(known, (0, 0, 0, 0, 0, T - known.shape[2]))
    return torch.cat([known.to(latents.device), config.normalise(latents)], dim=1)


def check_first(known: int, frames: int, config: VAEConfig) -> None:
    """Raise OptionError unless so many first frames can be known of TI2V: whole latent frames, and not all of them."""
    stride = config.temporal_stride
    if known % stride != 1 or known >= frames:
        raise OptionError(
            f"{known} first frames given for a video of {frames}; this model takes 1, {stride + 1}, "
            f"{2 * stride + 1} and so on, fewer than the video has: choose them with ImageFromBatch"
        )


def hold_first(first: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [B, C, T, Y, X] that begin with the known `first` [1, C, K, Y, X], and the mask [B, 1, T, Y, X] of what
    is unknown: TI2V's image conditioning as ComfyUI's LATENT carries it, and as `known_first` reads it."""
    unknown = torch.ones_like(latents[:, :1])
    unknown[:, :, : first.shape[2]] = 0
    known = first.to(latents).expand(latents.shape[0], -1, -1, -1, -1)
    return torch.cat([known, latents[:, :, first.shape[2] :]], dim=2), unknown


def known_first(latents: Tensor, unknown: Tensor, config: VAEConfig) -> Tensor | None:
    """`Conditioning.known` from un-normalised latents [1 or B, C, T, Y, X] and a mask [1 or B, 1, T, Y, X] of what is
    unknown (1), as ComfyUI's LATENT carries it; None where nothing is known. Raises OptionError for a mask of anything
    but whole frames from the first on."""
    if unknown.shape[1:] != (1, *latents.shape[2:]):
        raise OptionError(
            f"a noise mask of {list(unknown.shape)} given for latents of {list(latents.shape)}: only a mask over "
            "latent frames [batch, 1, frames, rows, columns] is supported, in which the first frame may be known"
        )
    if bool((unknown == 1).all()):
        return None
    count = int((unknown[0, 0, :, 0, 0] == 0).sum())
    first, later = unknown[:, :, :count], unknown[:, :, count:]
    if not 0 < count < unknown.shape[2] or bool((first != 0).any()) or bool((later != 1).any()):
        raise OptionError(
            "the noise mask keeps something else than whole latent frames from the first on, which is not supported"
        )
    return config.normalise(latents[:, :, :count])
