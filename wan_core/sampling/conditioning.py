"""What besides noise goes into the transformer: text rows, the known image's channels, or a known first latent frame.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.

Conditioning is prepared as data, so that one loop denoises every task. Source: Wan2.2/wan/image2video.py,
textimage2video.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config import OptionError, check_size
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.statistics import normalise
from wan_core.models.vae.vae import VideoVAE


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """Everything the denoising loop needs besides the plan, the experts and the noise. Latents here are normalised."""

    cond: Tensor  # text rows of the prompt, [1 or B, S, text_dim]
    uncond: Tensor | None = None  # of the negative prompt; None where the plan never guides
    concat: Tensor | None = None  # [1 or B, 4 + C, T, Y, X]: mask and image latents after the noise channels (I2V)
    known: Tensor | None = None  # [1 or B, C, 1, Y, X]: the first latent frame, held fixed at timestep 0 (TI2V)


def image_channels(vae: VideoVAE, first: Tensor | None, last: Tensor | None, frames: int) -> Tensor:
    """The 4 mask and C image channels of I2V: [1, 4 + C, T, Y, X], float32, normalised.

    first, last: [1, 3, 1, H, W] in -1..1, either may be None.
    """
    video, unknown = known_frames(first, last, frames)
    latents = vae.encode(video)
    return join_image(latents, frame_mask(unknown, latents), vae.config)


def known_frames(first: Tensor | None, last: Tensor | None, frames: int) -> tuple[Tensor, Tensor]:
    """A clip [1, 3, F, H, W] of which the first frame, the last or both are known, and which are not [F] (1: unknown).

    The unknown frames between are grey (0): so the model was trained. Raises OptionError where nothing is known.
    """
    given = first if first is not None else last
    if given is None:
        raise OptionError("image conditioning needs a first frame, a last frame or both; none was given")
    video = given.new_zeros(1, 3, frames, *given.shape[-2:])
    unknown = video.new_ones(frames)
    for index, image in ((0, first), (-1, last)):
        if image is not None:
            video[:, :, index] = image[:, :, 0]
            unknown[index] = 0
    return video, unknown


def frame_mask(unknown: Tensor, latents: Tensor) -> Tensor:
    """Which video frames are unknown, [F], as a mask [1, 4, T, Y, X] for their latents.

    A latent frame holds four video frames, so it has four mask channels (the first, alone, repeats).
    """
    mask = torch.cat([unknown[:1].repeat(4), unknown[1:]]).view(-1, 4).T  # [4, T]
    return mask[None, :, :, None, None].to(latents).expand(-1, -1, -1, *latents.shape[-2:])


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
    return torch.cat([known.to(latents.device), normalise(latents, config)], dim=1)


def first_latent(vae: VideoVAE, first: Tensor) -> Tensor:
    """The known first latent frame of TI2V: [1, C, 1, Y, X] normalised, from an image [1, 3, 1, H, W] in -1..1."""
    return vae.normalise(vae.encode(first))


def empty_latents(config: VAEConfig, width: int, height: int, frames: int) -> Tensor:
    """Zeros [1, C, T, Y, X] for a video of this size. Raises OptionError for a size that the model cannot make."""
    stride = config.spatial_stride
    check_size(width, height, frames, multiple=2 * stride, temporal=config.temporal_stride)  # patches of 2 x 2 latents
    T = (frames - 1) // config.temporal_stride + 1
    return torch.zeros(1, config.z_dim, T, height // stride, width // stride)


def hold_first(first: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [1, C, T, Y, X] that begin with the known `first` [1, C, 1, Y, X], and the mask [1, 1, T, Y, X] of what
    is unknown: TI2V's image conditioning as ComfyUI's LATENT carries it, and as `known_first` reads it."""
    unknown = torch.ones_like(latents[:, :1])
    unknown[:, :, 0] = 0
    return torch.cat([first.to(latents), latents[:, :, 1:]], dim=2), unknown


def known_first(latents: Tensor, unknown: Tensor, config: VAEConfig) -> Tensor | None:
    """`Conditioning.known` from un-normalised latents [1 or B, C, T, Y, X] and a mask [1 or B, 1, T, Y, X] of what is
    unknown (1), as ComfyUI's LATENT carries it; None where nothing is known. Raises OptionError for any other mask."""
    if unknown.shape[1:] != (1, *latents.shape[2:]):
        raise OptionError(
            f"a noise mask of {list(unknown.shape)} given for latents of {list(latents.shape)}: only a mask over "
            "latent frames [batch, 1, frames, rows, columns] is supported, in which the first frame may be known"
        )
    if bool((unknown == 1).all()):
        return None
    if bool((unknown[:, :, 0] != 0).any()) or bool((unknown[:, :, 1:] != 1).any()):
        raise OptionError("the noise mask keeps more or less than the whole first latent frame, which is not supported")
    return normalise(latents[:, :, :1], config)


def size_for_image(width: int, height: int, area: int, multiple: int) -> tuple[int, int]:
    """(width, height) with at most `area` pixels and the aspect of a width x height image, in multiples of `multiple`.

    Source: image2video.py of Wan2.2.
    """
    rows, columns = sqrt(area * height / width) // multiple, sqrt(area * width / height) // multiple
    return int(max(1, columns)) * multiple, int(max(1, rows)) * multiple


def best_size_for_image(width: int, height: int, area: int, multiple: int) -> tuple[int, int]:
    """As `size_for_image`, but one side is fitted to the other after that was rounded; of the two ways, the one whose
    aspect is nearer. Source: best_output_size in utils.py of Wan2.2, used by textimage2video.py.
    """
    aspect = width / height

    def cells(length: float) -> int:
        return max(1, int(length // multiple)) * multiple

    width_first, height_first = cells(sqrt(area * aspect)), cells(sqrt(area / aspect))
    by_width = width_first, cells(area / width_first)
    by_height = cells(area / height_first), height_first

    def off(size: tuple[int, int]) -> float:
        return max(aspect / (size[0] / size[1]), size[0] / size[1] / aspect)

    return by_width if off(by_width) < off(by_height) else by_height


def draw_noise(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 noise on the CPU, as ComfyUI draws it, so that a seed means the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
