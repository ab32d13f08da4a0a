"""Configurations of the video VAEs of Wan 2.1 and 2.2, as plain numbers. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wan_core.config.checks import OptionError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """The causal video VAE of Wan 2.1 or 2.2. Source: Wan2.2/wan/modules/vae2_1.py and vae2_2.py.

    `patch` 2 and `residual` True select the 2.2 variant: pixels are folded 2x2 into channels, and every stage has an
    averaging shortcut. `latents_mean`/`latents_std` normalise latents for the transformer; `encode` and `decode` use
    *un-normalised* latents.
    """

    z_dim: int
    encoder_dim: int
    decoder_dim: int
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    patch: int = 1
    residual: bool = False
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def spatial_stride(self) -> int:
        """Pixels per latent row or column: 8 (2.1) or 16 (2.2)."""
        return self.patch * 2 ** (len(self.dim_mult) - 1)

    @property
    def temporal_stride(self) -> int:
        """Frames per latent frame after the first, 4."""
        return 2 ** sum(self.temporal_downsample)

    def latent_frames(self, frames: int) -> int:
        """Latent frames of a video of so many frames."""
        return (frames - 1) // self.temporal_stride + 1

    def video_frames(self, latent_frames: int) -> int:
        """Frames of a video of so many latent frames."""
        return self.temporal_stride * (latent_frames - 1) + 1

    def whole_latents(self, pictures: Tensor) -> Tensor:
        """Pictures [F, H, W, 3] without the last frames and the edges that fill no latent: what ComfyUI's VAE encodes
        of them. Raises OptionError where nothing is left."""
        frames, stride = self.video_frames(self.latent_frames(len(pictures))), self.spatial_stride
        rows, columns = (side // stride * stride for side in pictures.shape[1:3])
        if not rows or not columns:
            height, width = pictures.shape[1:3]
            raise OptionError(f"pictures of {width}x{height} given; the VAE encodes sides of at least {stride} pixels")
        top, left = ((side % stride) // 2 for side in pictures.shape[1:3])
        return pictures[:frames, top : top + rows, left : left + columns]

    def normalise(self, latents: Tensor) -> Tensor:
        """The transformer's latents of un-normalised ones: (latents - mean) / std per channel, fp32. [B, z, ...] -> [B,
        z, ...]. Mean and standard deviation are no buffers of the VAE: `module.to(bfloat16)` would round them."""
        mean, std = self._statistics(latents)
        return (latents.float() - mean) / std

    def denormalise(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents)
        return latents.float() * std + mean

    def _statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        shape = (-1, *[1] * (latents.ndim - 2))
        both = torch.tensor([self.latents_mean, self.latents_std]).to(latents.device, non_blocking=True)
        return both[0].view(shape), both[1].view(shape)


@dataclass(frozen=True, kw_only=True)
class TinyVAEConfig(VAEConfig):
    """A tiny autoencoder (`wan_core.models.vae.tiny`). widths: channels of the decoder's stages. of_model: it takes
    latents as the transformer has them; False: as the VAE has them, un-normalised."""

    dim_mult: tuple[int, ...] = (1, 1, 1, 1)
    widths: tuple[int, ...]
    of_model: bool


# fmt: off
WAN21_MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
              0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
WAN21_STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
             3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)
WAN22_MEAN = (-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
              0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
              -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
              -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667)
WAN22_STD = (0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
             0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
             0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
             0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744)
# fmt: on

VAE_21 = VAEConfig(z_dim=16, encoder_dim=96, decoder_dim=96, latents_mean=WAN21_MEAN, latents_std=WAN21_STD)
VAE_22 = VAEConfig(
    z_dim=48, encoder_dim=160, decoder_dim=256, patch=2, residual=True, latents_mean=WAN22_MEAN, latents_std=WAN22_STD
)

NAMES = {16: ("wan_2.1_vae", "A14B and all models but 5B"), 48: ("wan2.2_vae", "5B")}  # by channels: file, models


def check_latents(channels: int, shape: Sequence[int]) -> None:
    """Raise OptionError unless a VAE of so many channels decodes latents of `shape`."""
    if len(shape) == 5 and shape[1] == channels and 0 not in shape:
        return
    words = f"latents of {list(shape)} given, and this VAE decodes [batch, {channels}, frames, rows, columns]"
    own, other = NAMES.get(channels), NAMES.get(shape[1]) if len(shape) == 5 else None
    if own is not None and other not in (None, own):
        words += f": it is that of {own[1]}. Choose {other[0]}, the VAE of {other[1]}"
    raise OptionError(words)
