"""The tokens of S2V: those of the sound and of frames that came before, attention to the sound, positions of all.

Legend: B batch, L tokens, C channels, A audio frames, W layers of the speech encoder, T/Y/X latent frames, rows,
columns, N audio tokens of a latent frame, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.frames import CausalConv, activated, attend_to_frames
from wan_core.models.wan.families.s2v import AUDIO_FRAMES, MOTION_FRAMES, S2VConfig
from wan_core.models.wan.layers import CrossAttention, rotations
from wan_core.models.wan.model import patch_product
from wan_core.ops.kernels import fused

LEAD = 73  # audio frames in front of a clip: copies of its first, as many as motion frames
LEAD_LATENTS = 19  # latent frames that they become
ADAPTIVE_EPS = 1e-5
AT_ONCE = 8192  # tokens that attend to the sound at a time: shift and scale of a token are as large as itself


class Injected(NamedTuple):
    """What one injector reads: keys and values [B, T, N, H, D], shift and scale float32 [B, T, C]."""

    keys: Tensor
    values: Tensor
    shift: Tensor
    scale: Tensor


class AudioTokens(nn.Module):
    """Features [B, A, audio_dim] -> global tokens [B, A / 4, C] and local ones [B, A / 4, N, C], float32."""

    def __init__(self, config: S2VConfig) -> None:
        super().__init__()
        dim, self.tokens = config.dim, config.audio_tokens
        self.conv1_local = CausalConv(config.audio_dim, dim // 4 * self.tokens)
        self.conv1_global = CausalConv(config.audio_dim, dim // 4)
        self.conv2 = CausalConv(dim // 4, dim // 2, stride=2)
        self.conv3 = CausalConv(dim // 2, dim, stride=2)
        self.final_linear = nn.Linear(dim, dim)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, dim))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        x = features.transpose(1, 2)
        local = self.frames(self.conv1_local(x).unflatten(1, (self.tokens, -1)).flatten(0, 1))
        local = local.unflatten(0, (-1, self.tokens)).transpose(1, 2)
        padding = self.padding_tokens.float().expand(*local.shape[:2], -1, -1)
        weight, bias = self.final_linear.weight.float(), self.final_linear.bias.float()
        return F.linear(self.frames(self.conv1_global(x)), weight, bias), torch.cat([local, padding], 2)

    def frames(self, x: Tensor) -> Tensor:
        """[B, C / 4, A] -> [B, A / 4, C]."""
        return activated(self.conv3(activated(self.conv2(activated(x))))).transpose(1, 2)


class AudioEncoder(nn.Module):
    """Features of all layers of a speech encoder -> tokens of latent frames, in float32."""

    def __init__(self, config: S2VConfig) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((1, config.audio_layers, 1, 1), 0.01))
        self.encoder = AudioTokens(config)

    def forward(self, audio: Tensor) -> tuple[Tensor, Tensor]:
        """audio [B, W, audio_dim, 4 T] -> global tokens [B, T, C] and local ones [B, T, N, C]."""
        audio = audio.float()
        audio = torch.cat([audio[..., :1].expand(-1, -1, -1, LEAD), audio], -1)
        weights = F.silu(self.weights.float())
        mixed = ((audio * weights) / weights.sum(1, keepdim=True)).sum(1)  # [B, audio_dim, A]
        whole, local = self.encoder(mixed.transpose(1, 2))
        return whole[:, LEAD_LATENTS:], local[:, LEAD_LATENTS:]


class AudioAttention(CrossAttention):
    """Attention of video tokens to the audio tokens of their latent frame."""

    def to_frames(self, h: Tensor, keys: Tensor, values: Tensor, frame: Tensor) -> Tensor:
        """h [B, L, C] of the latent frames `frame` [L], keys and values [b, T, N, H, D] -> [B, L, C]."""
        q = fused.head_norm(self.q(h), self.norm_q.weight, self.heads, self.eps)
        return self.o(attend_to_frames(q, keys, values, frame))


class AdaptiveNorm(nn.Module):
    """The linear that makes shift and scale of a global token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [B, T, C] -> shift and scale, float32 [B, T, C]."""
        both = F.linear(F.silu(whole), self.linear.weight.float(), self.linear.bias.float())
        shift, scale = both.chunk(2, -1)
        return shift, scale


class AudioInjector(nn.Module):
    """Adds attention to the sound to the tokens of the video."""

    def __init__(self, config: S2VConfig) -> None:
        super().__init__()
        self.injector = nn.ModuleList(AudioAttention(config) for _ in range(config.injectors))
        self.injector_adain_layers = nn.ModuleList(AdaptiveNorm(config.dim) for _ in range(config.injectors))

    def prepare(self, whole: Tensor, local: Tensor) -> list[Injected]:
        """What each injector reads of the tokens of `AudioEncoder`. It does not depend on the step."""
        prepared = []
        for attention, norm in zip(self.attentions, self.injector_adain_layers, strict=True):
            rows = local.to(attention.norm_k.weight.dtype)
            keys, values = (x.unflatten(1, local.shape[1:3]) for x in attention.kv(rows.flatten(1, 2)))
            prepared.append(Injected(keys, values, *norm(whole)))
        return prepared

    @property
    def attentions(self) -> Sequence[AudioAttention]:
        return cast("Sequence[AudioAttention]", self.injector)

    def add(self, number: int, tokens: Tensor, injected: Injected, frame: Tensor) -> Tensor:
        """tokens [B, L, C], overwritten, of the latent frames `frame` [L]; those of frame T and later are none of the
        video's and stay as they are."""
        last = injected.keys.shape[1] - 1
        for rows, here in zip(tokens.split(AT_ONCE, 1), frame.split(AT_ONCE), strict=True):
            own = here.clamp(max=last)
            normed = F.layer_norm(rows.float(), rows.shape[-1:], eps=ADAPTIVE_EPS)
            h = torch.addcmul(injected.shift[:, own], normed, 1 + injected.scale[:, own]).to(rows.dtype)
            attended = self.attentions[number].to_frames(h, injected.keys, injected.values, own)
            rows.add_(torch.where((here <= last)[:, None], attended, 0))
        return tokens


def check_audio(audio: Tensor, config: S2VConfig) -> None:
    """Raise ValueError for features that no S2V model takes."""
    wanted = (config.audio_layers, config.audio_dim)
    if audio.ndim != 4 or tuple(audio.shape[1:3]) != wanted or not audio.shape[3] or audio.shape[3] % AUDIO_FRAMES:
        raise ValueError(
            f"audio features of {list(audio.shape)} given; this model takes [batch, {wanted[0]}, {wanted[1]}, frames], "
            f"{AUDIO_FRAMES} frames for every latent frame"
        )


REFERENCE_FRAME = 30  # its position in time
Grid = tuple[int, int, int]
Places = tuple[Sequence[float], ...]  # in time, rows and columns


class FramePacker(nn.Module):
    """Latents [B, 16, Tm, 2 Y, 2 X] before the clip -> tokens [B, M, C], the newest frame's first."""

    def __init__(self, config: S2VConfig) -> None:
        super().__init__()
        channels, dim = config.in_channels, config.dim
        self.proj = nn.Conv3d(channels, dim, (1, 2, 2), (1, 2, 2))
        self.proj_2x = nn.Conv3d(channels, dim, (2, 4, 4), (2, 4, 4))
        self.proj_4x = nn.Conv3d(channels, dim, (4, 8, 8), (4, 8, 8))

    def forward(self, latents: Tensor) -> Tensor:
        latents = latents[:, :, -sum(MOTION_FRAMES) :]
        latents = F.pad(latents, (0, 0, 0, 0, sum(MOTION_FRAMES) - latents.shape[2], 0))
        oldest, older, newest = latents.split(MOTION_FRAMES, 2)
        pairs = (newest, self.proj), (older, self.proj_2x), (oldest, self.proj_4x)
        return torch.cat([_patches(x, conv) for x, conv in pairs], 1)


def _patches(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """What does not fill a patch is left out."""
    T, Y, X = (side // each * each for side, each in zip(x.shape[2:], conv.kernel_size, strict=True))
    return patch_product(x[:, :, :T, :Y, :X], conv)


def position_table(
    grid: Grid, axes: Grid, device: torch.device, *, reference: bool, motion: bool, comfyui: bool
) -> Tensor:
    """The rotation of every token of a video of `grid` and of what follows it: float32 [L, 1, D/2, 2] holding
    (cos, sin).

    comfyui: motion frames where ComfyUI has them: the oldest at -19 .. -16 in time, and rows and columns of larger
    patches between whole ones, not cut off to whole ones.
    """
    T, Y, X = grid
    rows, columns = range(Y), range(X)
    parts: list[Places] = [(range(T), rows, columns)]
    if reference:
        parts.append(([REFERENCE_FRAME], rows, columns))
    if motion:
        oldest = range(-19, -15) if comfyui else (-19, -14, -9, -4)
        parts.append(([-1], rows, columns))
        parts += [
            (times, *(spread(side, side // every, whole=not comfyui) for side in (Y, X)))
            for times, every in (([-3], 2), (oldest, 4))
        ]
    tensors = ([torch.tensor([*one], dtype=torch.float64, device=device) for one in places] for places in parts)
    return torch.cat([rotations(places, axes) for places in tensors])


def spread(side: int, count: int, *, whole: bool) -> list[float]:
    """So many places from the first to the last of a side; `whole`: cut off to whole ones, as in the reference."""
    places = np.linspace(0, side - 1, count)
    return (places.astype(int) if whole else places).tolist()
