"""The layers of the diffusion transformer. They know shapes and numerics, and no rank, cache, backend or task.

Legend: B batch, L tokens, S text tokens, H heads, D head dim, C = H * D, F modulation rows per sample (1, or one per
latent frame when frames have their own timestep: TI2V).

Source: Wan2.2/wan/modules/model.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.config import DiTConfig
from wan_core.ops.attention.registry import Attend
from wan_core.ops.attention.sdpa import sdpa
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.blocked import quantize_values
from wan_core.ops.kernels.formats import Format, Quantized
from wan_core.ops.kernels.reference import scaled_norm

HALVED_TOKENS = 16384  # from here on a feed-forward runs in two halves
HEAD_TOKENS = 16384  # that the head takes at a time
Fp8Attend = Callable[[Quantized, Quantized, Quantized], Quantized]


class RMSNorm(nn.Module):
    """The weight of a root-mean-square norm over all heads at once; `fused.head_norm` applies it."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps


class SelfAttention(nn.Module):
    """Attention of all video tokens to all video tokens.

    `attend` is a seam: any callable q, k, v [B, L, H, D] -> [B, L, H, D] (attention backends, sparse attention,
    Ulysses, ring). One that has a method `quantized` is handed queries, keys and values in FP8; one that has a method
    `agree` attends beyond the tokens it is handed, and makes scales and means the same for all.
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

    def forward(self, x: Tensor, mul: Tensor, add: Tensor, eps: float, rope: Tensor) -> Tensor:
        """Attention of x [B, L, C] after its norm (`fused.norm` by mul and add); rope [L, 1, D/2, 2] -> [B, L, C].

        Here, not in the block, so that the normed tokens are gone before attention needs the room.
        """
        quantized = getattr(self.attend, "quantized", None)
        if quantized is not None:
            return self.fp8(quantized, x, mul, add, eps, rope)
        h = self.normed(x, mul, add, eps)
        q = fused.head_norm(self.q(h), self.norm_q.weight, self.heads, self.norm_q.eps, rope)
        k = fused.head_norm(self.k(h), self.norm_k.weight, self.heads, self.norm_k.eps, rope)
        v = self.v(h).unflatten(-1, (self.heads, -1))
        del h
        out = self.attend(q, k, v).flatten(-2)
        del q, k, v
        return self.o(out)

    def normed(self, x: Tensor, mul: Tensor, add: Tensor, eps: float) -> Any:
        """What q, k and v multiply."""
        return shared_input(self.q, fused.norm(x, mul, add, eps, input_format(self.q)))

    def fp8(self, attend: Fp8Attend, x: Tensor, mul: Tensor, add: Tensor, eps: float, rope: Tensor) -> Tensor:
        """Norm, rotation and quantisation in one pass; the FP8 that comes out is the output projection's input.

        An `attend` that wants its inputs in memory by heads, in whole blocks of tokens, says the length of a block in
        its attribute `block` (`wan_core.ops.kernels.blocked`); one that sees a shard of the tokens brings `agree`."""
        block, agree = getattr(self.attend, "block", 0), getattr(self.attend, "agree", None)
        h = self.normed(x, mul, add, eps)  # made here, so that nobody else holds it while attention needs the room
        q = fused.head_norm_fp8(self.q(h), self.norm_q.weight, self.heads, self.norm_q.eps, rope, block=block)
        k = fused.head_norm_fp8(
            self.k(h), self.norm_k.weight, self.heads, self.norm_k.eps, rope, centre=True, block=block, agree=agree
        )
        v = self.fp8_values(self.v(h), block, agree)
        del h
        out = attend(q, k, v)
        del q, k, v
        joined = Quantized(out.data.flatten(-2), out.scale)
        return self.o(joined if getattr(self.o, "takes_fp8", False) else joined.dequantize(x.dtype))

    def fp8_values(self, v: Tensor, block: int, agree: fused.Agree | None) -> Quantized:
        if block:
            return quantize_values(v, self.heads, block)
        found = fused.quantize(v, "tensor", agree)
        return Quantized(found.data.unflatten(-1, (self.heads, -1)), found.scale)


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

    def kv(self, text: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [B, S, H, D] of embedded text [B, S, C]."""
        k = fused.head_norm(self.k(text), self.norm_k.weight, self.heads, self.norm_k.eps)
        return k, self.v(text).unflatten(-1, (self.heads, -1))

    def forward(self, x: Tensor | Quantized, kv: tuple[Tensor, ...]) -> Tensor:
        """x [B, L, C], kv two of [B, S, H, D] -> [B, L, C]."""
        q = fused.head_norm(self.q(x), self.norm_q.weight, self.heads, self.norm_q.eps)
        out = self.attend(q, *kv).flatten(-2)
        del q
        return self.o(out)


class Block(nn.Module):
    """Self-attention, cross-attention and feed-forward; the first and last shifted, scaled and gated by the timestep.

    Between the matrix products stand fused passes over memory (`wan_core.ops.kernels.fused`), which hand the next
    product
    its input in the format that it multiplies.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.randn(1, 6, config.dim).mul_(config.dim**-0.5))
        self.self_attn = SelfAttention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)  # the official name: it stands before cross-attention
        self.cross_attn = CrossAttention(config)
        self.ffn = nn.Sequential(
            nn.Linear(config.dim, config.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(config.ffn_dim, config.dim)
        )

    def forward(self, x: Tensor, modulation: Tensor, rope: Tensor, kv: tuple[Tensor, ...]) -> Tensor:
        """x [B, L, C], which may be overwritten; modulation float32 [B, F, 6, C]; rope [L, 1, D/2, 2]; kv two of
        [B, S, H, D] -> [B, L, C]."""
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (self.modulation.float() + modulation).unbind(2)
        weight, bias = (p.float().view(1, 1, -1) for p in (self.norm3.weight, self.norm3.bias))
        h = self.self_attn(x, 1 + scale_a, shift_a, self.eps, rope)
        x, h = fused.residual_norm(x, h, gate_a, weight, bias, self.eps, input_format(self.cross_attn.q))
        h = self.cross_attn(h, kv)
        x, h = fused.residual_norm(x, h, None, 1 + scale_f, shift_f, self.eps, input_format(self.ffn[0]))
        return self.feed_forward(x, h, gate_f)

    def feed_forward(self, x: Tensor, h: Tensor | Quantized, gate: Tensor) -> Tensor:
        """x + gate * the feed-forward of its norm h. In two halves where there are many tokens: the hidden layer is the
        largest tensor of a forward, and half of it still fills the device. Not in a compiled block, where a limit would
        be a reason to compile again."""
        split = x.shape[:1] == gate.shape[:1] == (1,) and gate.shape[1] == 1 and fused.overwrites(x)
        if torch.compiler.is_compiling() or not split or x.shape[1] < HALVED_TOKENS:
            return fused.residual(x, self.hidden(h), gate)
        first = x.shape[1] // 32 * 16  # products want their scales to begin at a multiple of 16 bytes
        parts = (first, x.shape[1] - first)
        halves = h.split(parts, 1) if isinstance(h, Tensor) else map(Quantized, *(t.split(parts, 1) for t in h))
        for rows, normed in zip(x.split(parts, 1), halves, strict=True):
            fused.residual(rows, self.hidden(normed), gate)
        return x

    def hidden(self, h: Tensor | Quantized) -> Tensor:
        """The feed-forward of h [B, L, C]. Its products are freed as soon as the next is made."""
        inner = self.ffn[0](h)
        inner = fused.gelu(inner, input_format(self.ffn[2]))
        return self.ffn[2](inner)


def input_format(linear: nn.Module) -> Format | None:
    """The FP8 format that `linear` wants its input in; None for plain numbers."""
    return getattr(linear, "fmt", None)


def shared_input(linear: nn.Module, x: Any) -> Any:
    """x as `linear` multiplies it, made once where several linears of a kind share it (q, k, v)."""
    quantize = getattr(linear, "quantize", None)
    return x if quantize is None or not isinstance(x, Tensor) else quantize(x)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """float32 products on tensor cores inside, if `allowed`. The setting is the process's, and others' (ComfyUI's)
    products must not change with ours, so it is put back."""
    matmul = torch.backends.cuda.matmul
    name, on = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    if not allowed:  # nothing is read either: torch refuses to, where a host has used both its old and its new setting
        yield
        return
    before = getattr(matmul, name)
    setattr(matmul, name, on)
    try:
        yield
    finally:
        setattr(matmul, name, before)


class Head(nn.Module):
    """Final norm, modulation and projection to patches, in float32 as in the reference: velocities are small
    differences. Some tokens at a time, because all of them in float32 would be the peak of a forward's memory."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim).mul_(config.dim**-0.5))
        self.head = nn.Linear(config.dim, math.prod(config.patch_size) * config.out_channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x [B, L, C], time float32 [B, F, C] -> float32 [B, L, patch volume * out channels]."""
        shift, scale = (self.modulation.float() + time[:, :, None]).unbind(2)
        frames = shift.shape[1]
        parts = x.split(HEAD_TOKENS if frames == 1 else x.shape[1] // frames, 1)  # of one modulation row each
        rows = [slice(f, f + 1) for f in (range(frames) if frames > 1 else [0] * len(parts))]
        found = [self.project(part, 1 + scale[:, f], shift[:, f]) for part, f in zip(parts, rows, strict=True)]
        return torch.cat(found, 1)

    def project(self, x: Tensor, mul: Tensor, add: Tensor) -> Tensor:
        normed = scaled_norm(x, mul, add, self.eps)
        with tf32(x.dtype == torch.bfloat16):  # ten bits of mantissa, where what comes in has eight
            return F.linear(normed, self.head.weight.float(), self.head.bias.float())


def timestep_embedding(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoids of `timestep` [...] in 0..1000: float32 [..., dim], cosines first. In float64: 999 and 1000 must
    differ."""
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angle = timestep.double()[..., None] * 10000.0**-exponent
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()
