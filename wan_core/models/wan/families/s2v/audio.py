"""Sound in S2V: features of speech -> five tokens and a global one for each latent frame -> attention after blocks.

Legend: B batch, L tokens, T latent frames, N audio tokens of a frame (5), A audio frames, W layers of the speech
encoder, H heads, D head dim, C = H * D.
Source: Wan2.2/wan/modules/s2v/audio_utils.py, auxi_blocks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.s2v.config import AUDIO_FRAMES, S2VConfig
from wan_core.models.wan.layers import CrossAttention
from wan_core.ops.kernels import fused

LEAD = 73  # audio frames in front of a clip: copies of its first, as many as motion frames
LEAD_LATENTS = 19  # latent frames that they become
EPS = 1e-6
ADAPTIVE_EPS = 1e-5
AT_ONCE = 8192  # tokens that attend to the sound at a time: shift and scale of a token are as large as itself


class Injected(NamedTuple):
    """What one injector reads: keys and values [B, T, N, H, D], shift and scale float32 [B, T, C]."""

    keys: Tensor
    values: Tensor
    shift: Tensor
    scale: Tensor


class CausalConv(nn.Module):
    """A convolution over time [B, C, A], with the first frame repeated in front; in float32, as in the reference."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, 3, stride)

    def forward(self, x: Tensor) -> Tensor:
        assert self.conv.bias is not None
        padded = F.pad(x, (2, 0), mode="replicate")
        return F.conv1d(padded, self.conv.weight.float(), self.conv.bias.float(), self.conv.stride)


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
        return _activated(self.conv3(_activated(self.conv2(_activated(x))))).transpose(1, 2)


def _activated(x: Tensor) -> Tensor:
    """[B, C, A], normalised over its channels, through SiLU."""
    rows = x.transpose(1, 2)
    return F.silu(F.layer_norm(rows, rows.shape[-1:], eps=EPS)).transpose(1, 2)


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
        """h [B, L, C] of the latent frames `frame` [L], keys and values [b, T, N, H, D] -> [B, L, C].

        A frame's tokens need not stand together (ranks and sparse attention order them), so all audio tokens are keys,
        of which each query sees those of its frame: there are about a hundred.
        """
        T, N = keys.shape[1:3]
        q = fused.head_norm(self.q(h), self.norm_q.weight, self.heads, self.norm_q.eps)
        own = frame[:, None] == torch.arange(T, device=frame.device).repeat_interleave(N)  # [L, T * N]
        k, v = (x.flatten(1, 2).expand(len(h), -1, -1, -1) for x in (keys, values))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, attn_mask=own)
        return self.o(out.transpose(1, 2).flatten(-2))


class AdaptiveNorm(nn.Module):
    """The linear that makes shift and scale of a global token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [B, T, C] -> shift and scale, float32 [B, T, C]."""
        found = F.linear(F.silu(whole), self.linear.weight.float(), self.linear.bias.float())
        shift, scale = found.chunk(2, -1)
        return shift, scale


class AudioInjector(nn.Module):
    """Adds attention to the sound to the tokens of the video."""

    def __init__(self, config: S2VConfig) -> None:
        super().__init__()
        self.injector = nn.ModuleList(AudioAttention(config) for _ in range(config.injectors))
        self.injector_adain_layers = nn.ModuleList(AdaptiveNorm(config.dim) for _ in range(config.injectors))

    def prepare(self, whole: Tensor, local: Tensor) -> list[Injected]:
        """What each injector reads of the tokens of `AudioEncoder`. It does not depend on the step."""
        found = []
        for attention, norm in zip(self.attentions, self.injector_adain_layers, strict=True):
            rows = local.to(attention.norm_k.weight.dtype)
            keys, values = (x.unflatten(1, local.shape[1:3]) for x in attention.kv(rows.flatten(1, 2)))
            found.append(Injected(keys, values, *norm(whole)))
        return found

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
            found = self.attentions[number].to_frames(h, injected.keys, injected.values, own)
            rows.add_(torch.where((here <= last)[:, None], found, 0))
        return tokens


def check_audio(audio: Tensor, config: S2VConfig) -> None:
    """Raise ValueError for features that no S2V model takes."""
    wanted = (config.audio_layers, config.audio_dim)
    if audio.ndim != 4 or tuple(audio.shape[1:3]) != wanted or not audio.shape[3] or audio.shape[3] % AUDIO_FRAMES:
        raise ValueError(
            f"audio features of {list(audio.shape)} given; this model takes [batch, {wanted[0]}, {wanted[1]}, frames], "
            f"{AUDIO_FRAMES} frames for every latent frame"
        )
