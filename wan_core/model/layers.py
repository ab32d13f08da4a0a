"""The layers of the diffusion transformer. They know shapes and numerics, and no rank, cache, backend or task.

Legend: B batch, L tokens, S text tokens, H heads, D head dim, C = H * D, F modulation rows per sample (1, or one per
latent frame when frames have their own timestep: TI2V).

Source: Wan2.2/wan/modules/model.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.attention.registry import Attend
from wan_core.attention.sdpa import sdpa
from wan_core.config import DiTConfig
from wan_core.model.rope import apply_rope


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, statistics in float32 (inside the kernel)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm without affine, then x * (1 + scale) + shift: float32 [B, L, C] from x [B, L, C] and float32 [B, F, C].

    float32, because the modulation reaches several hundred and is centred on one: bf16 would leave it two digits.
    """
    rows = x.unflatten(1, (shift.shape[1], -1))  # [B, F, L/F, C]
    normed = F.layer_norm(rows.float(), rows.shape[-1:], eps=eps)
    return torch.addcmul(shift[:, :, None], normed, 1 + scale[:, :, None]).flatten(1, 2)


def gated(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """x + update * gate, summed in float32 and rounded once: x, update [B, L, C], gate float32 [B, F, C]."""
    x_rows, update_rows = (t.unflatten(1, (gate.shape[1], -1)) for t in (x, update))  # [B, F, L/F, C]
    # addcmul promotes inside its kernel: no float32 copies of x and update
    return torch.addcmul(x_rows, update_rows, gate[:, :, None]).flatten(1, 2).type_as(x)


class SelfAttention(nn.Module):
    """Attention of all video tokens to all video tokens.

    `attend` is a seam: any callable q, k, v [B, L, H, D] -> [B, L, H, D] (attention backends, sparse attention,
    Ulysses, ring).
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.o = nn.Linear(config.dim, config.dim)
        self.norm_q = RMSNorm(config.dim, config.eps)  # over all heads at once, before they are split
        self.norm_k = RMSNorm(config.dim, config.eps)
        self.attend: Attend = sdpa

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x [B, L, C], rope [L, 1, D/2, 2] -> [B, L, C]."""
        q = apply_rope(self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1)), rope)
        k = apply_rope(self.norm_k(self.k(x)).unflatten(-1, (self.heads, -1)), rope)
        v = self.v(x).unflatten(-1, (self.heads, -1))
        return self.o(self.attend(q, k, v).flatten(-2))


class CrossAttention(nn.Module):
    """Attention of video tokens to text rows. Keys and values do not depend on the step: `kv` runs once per prompt."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.o = nn.Linear(config.dim, config.dim)
        self.norm_q = RMSNorm(config.dim, config.eps)
        self.norm_k = RMSNorm(config.dim, config.eps)
        self.attend: Attend = sdpa

    def kv(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, S, H, D] of embedded text [B, S, C]."""
        k = self.norm_k(self.k(text)).unflatten(-1, (self.heads, -1))
        return k, self.v(text).unflatten(-1, (self.heads, -1))

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        q = self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1))
        return self.o(self.attend(q, *kv).flatten(-2))


class Block(nn.Module):
    """Self-attention, cross-attention and feed-forward; the first and last shifted, scaled and gated by the
    timestep."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)
        self.self_attn = SelfAttention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)  # the official name: it stands before cross-attention
        self.cross_attn = CrossAttention(config)
        self.ffn = nn.Sequential(
            nn.Linear(config.dim, config.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(config.ffn_dim, config.dim)
        )

    def forward(self, x: Tensor, modulation: Tensor, rope: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, L, C]; modulation float32 [B, F, 6, C]; rope [L, 1, D/2, 2]; kv two of [B, S, H, D] -> [B, L, C]."""
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (self.modulation.float() + modulation).unbind(2)
        x = gated(x, self.self_attn(modulate(x, shift_a, scale_a, self.eps).type_as(x), rope), gate_a)
        x = x + self.cross_attn(self.normed3(x), kv)
        return gated(x, self.ffn(modulate(x, shift_f, scale_f, self.eps).type_as(x)), gate_f)

    def normed3(self, x: Tensor) -> Tensor:
        weight, bias = self.norm3.weight.to(x.dtype), self.norm3.bias.to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)  # statistics in float32 inside the kernel


class Head(nn.Module):
    """Final norm, modulation and projection to patches, in float32 as in the reference: velocities are small
    differences."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)
        self.head = nn.Linear(config.dim, math.prod(config.patch_size) * config.out_channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x [B, L, C], time float32 [B, F, C] -> float32 [B, L, patch volume * out channels]."""
        shift, scale = (self.modulation.float() + time[:, :, None]).unbind(2)
        return F.linear(modulate(x, shift, scale, self.eps), self.head.weight.float(), self.head.bias.float())


def timestep_embedding(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoids of `timestep` [...] in 0..1000: float32 [..., dim], cosines first. In float64: 999 and 1000 must
    differ."""
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angle = timestep.double()[..., None] * 10000.0**-exponent
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()
