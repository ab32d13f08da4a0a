"""Tiny autoencoders for Wan's latents (TAEHV): `taew2_1`, `taew2_2`, and lightx2v's `lighttaew2_1`, `lighttaew2_2`.

They have 2D convolutions, blocks that also see the frame before, and layers that make several frames of one, or one of
several. A few million weights decode a video in a fraction of the time and memory of the VAE, at less quality: for
previews, and for trying things out.

Frames travel as a batch, [B * T, C, Y, X]. As in `vae`, a clip is processed in chunks of latent frames, and blocks keep
their last frame: every chunk size gives the same result. Parameter names are those of the files.

Legend: B batch, C channels, z latent channels, F/H/W frames and pixels of the video, T/Y/X of the latents.
Source: github.com/madebyollin/taehv, taehv.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.vae.config import TinyVAEConfig
from wan_core.models.vae.vae import VideoVAE

History = dict[nn.Module, Tensor]


class Clamp(nn.Module):
    """Latents within -3 to 3, softly."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class MemoryBlock(nn.Module):
    """A residual block that also sees the frame before; before the first there are zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            conv(2 * width, width), nn.ReLU(), conv(width, width), nn.ReLU(), conv(width, width)
        )  # fmt: skip

    def forward(self, x: Tensor, videos: int, history: History) -> Tensor:
        frames = x.unflatten(0, (videos, -1))  # [B, T, C, Y, X]
        past = history.get(self)
        past = torch.zeros_like(frames[:, :1]) if past is None else past
        before = torch.cat([past, frames[:, :-1]], 1).flatten(0, 1)
        history[self] = frames[:, -1:].clone()
        return F.relu(self.conv(torch.cat([x, before], 1)) + x)


class Pool(nn.Module):
    """One frame of `stride` frames."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(width * stride, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.reshape(-1, self.stride * x.shape[1], *x.shape[2:]))


class Grow(nn.Module):
    """`stride` frames of one frame."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width * stride, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).reshape(-1, *x.shape[1:])

    def last(self, x: Tensor) -> Tensor:
        """The last of the frames alone."""
        return F.conv2d(x, self.conv.weight[-x.shape[1] :])


def conv(inputs: int, outputs: int, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)


def encoder_layers(config: TinyVAEConfig) -> nn.Sequential:
    """Pixels 0..1 in patches -> latents."""
    width = config.encoder_dim
    layers: list[nn.Module] = [conv(3 * config.patch**2, width), nn.ReLU()]
    for stride in (2, 2, 1):
        layers += [Pool(width, stride), conv(width, width, 2, bias=False), *(MemoryBlock(width) for _ in range(3))]
    return nn.Sequential(*layers, conv(width, config.z_dim))


def decoder_layers(config: TinyVAEConfig) -> nn.Sequential:
    """Latents -> pixels 0..1 in patches."""
    widths = config.widths
    layers: list[nn.Module] = [Clamp(), conv(config.z_dim, widths[0]), nn.ReLU()]
    for width, following, stride in zip(widths, widths[1:], (1, 2, 2), strict=False):
        layers += [*(MemoryBlock(width) for _ in range(3)), nn.Upsample(scale_factor=2), Grow(width, stride)]
        layers.append(conv(width, following, bias=False))
    return nn.Sequential(*layers, nn.ReLU(), conv(widths[-1], 3 * config.patch**2))


class TinyVAE(VideoVAE):
    """A `VideoVAE` of another architecture, with the same arguments and results."""

    config: TinyVAEConfig

    def __init__(self, config: TinyVAEConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.strips = None  # each rank decodes the whole picture
        self.encoder, self.decoder = encoder_layers(config), decoder_layers(config)  # type: ignore[assignment]

    @property
    def own(self) -> Tensor:
        return self.decoder[-1].weight  # type: ignore[index, return-value]

    def _encode_chunks(self, video: Tensor, spans: list[tuple[int, int]]) -> Iterator[Tensor]:
        """Latent frame n is of the frames 4 n to 4 n + 3; the last frame is repeated. Log variances are 0."""
        history, time = History(), self.config.temporal_stride
        for start, stop in spans:
            pixels = self._to_own(video[:, :, start * time : stop * time]) / 2 + 0.5
            pixels = torch.cat([pixels, pixels[:, :, -1:].expand(-1, -1, -pixels.shape[2] % time, -1, -1)], 2)
            patches = F.pixel_unshuffle(pixels.transpose(1, 2).flatten(0, 1), self.config.patch)
            latents = self._run(self.encoder, patches, len(video), history)
            latents = self.config.denormalise(latents).to(latents) if self.config.of_model else latents
            yield torch.cat([latents, torch.zeros_like(latents)], 1)

    def _decode_chunks(self, latents: Tensor, spans: list[tuple[int, int]]) -> Iterator[Tensor]:
        """The first latent frame gives one frame: the three before it are left out."""
        history = History()
        for start, stop in spans:
            some = latents[:, :, start:stop]
            some = self._to_own(self.config.normalise(some) if self.config.of_model else some)
            patches = self._run(self.decoder, some.transpose(1, 2).flatten(0, 1), len(some), history)
            frames = torch.stack([F.pixel_shuffle(one, self.config.patch) for one in patches.unbind(2)], 2)
            frames = frames if start else frames[:, :, self.config.temporal_stride - 1 :]
            yield frames * 2 - 1

    def stills(self, latents: Tensor) -> Iterator[Tensor]:
        """For previews: a picture [B, 3, 1, H, W] in -1..1 for each frame of the transformer's latents [B, z, T, Y, X],
        in a quarter of the time that all frames take. As the reference's decoder without upsampling in time."""
        history = History()
        for one in latents.split(1, 2):
            one = self._to_own(one if self.config.of_model else self.config.denormalise(one))
            patches = self._run(self.decoder, one[:, :, 0], len(one), history, still=True)
            yield F.pixel_shuffle(patches[:, :, 0], self.config.patch)[:, :, None] * 2 - 1

    @staticmethod
    def _run(layers: nn.Module, x: Tensor, videos: int, history: History, still: bool = False) -> Tensor:
        """Frames [B * T, C, Y, X] -> [B, C, T, Y, X]. still: one frame for each, where layers make several."""
        for layer in layers.children():
            if isinstance(layer, MemoryBlock):
                x = layer(x, videos, history)
            else:
                x = layer.last(x) if still and isinstance(layer, Grow) else layer(x)
        return x.unflatten(0, (videos, -1)).transpose(1, 2)
