"""The layers of the diffusion transformer. They know shapes and numerics, and no rank, cache, backend or task.

Legend: B batch, L tokens, S text tokens, H heads, D head dim, C = H * D, F modulation rows per sample (1, or one per
latent frame when frames have their own timestep: TI2V).

Source: Wan2.2/wan/modules/model.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.prepared_text import TokenBias
from wan_core.ops.attention.protocol import SINGLE, Attention, AttentionCall
from wan_core.ops.attention.sdpa import SDPA, biased
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.block_layout import Blocked
from wan_core.ops.kernels.blocked import quantize_values
from wan_core.ops.kernels.formats import Format, Quantized
from wan_core.ops.kernels.reference import scaled_norm
from wan_core.ops.quant.linear import Linear, QuantLinear

HALVED_TOKENS = 16384  # from here on a feed-forward runs in two halves
HEAD_TOKENS = 16384  # that the head takes at a time
NAG_TOKENS = 4096  # that normalized attention guidance, or attention with a bias, takes at a time
Fp8 = Quantized | Blocked
QKV = tuple[Tensor, Tensor, Tensor] | tuple[Fp8, Fp8, Fp8]


class AttentionLayer(nn.Module):
    """The parameters of self- and cross-attention. `attend` is a seam: backends, sparse attention, ranks."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads, self.eps = config.num_heads, config.eps
        self.q = Linear(config.dim, config.dim)
        self.k = Linear(config.dim, config.dim)
        self.v = Linear(config.dim, config.dim)
        self.o = Linear(config.dim, config.dim)
        # Over all heads at once, before they are split: `fused.head_norm` applies their weights.
        self.norm_q = nn.RMSNorm(config.dim, config.eps)
        self.norm_k = nn.RMSNorm(config.dim, config.eps)
        self.attend: Attention = SDPA


class SelfAttention(AttentionLayer):
    """Attention of all video tokens to all video tokens, in two parts: `project`, then `attended`.

    `attend` says whether it takes FP8 and in which layout; `project` writes queries, keys and values so.
    """

    def project(self, x: Tensor, mul: Tensor, add: Tensor, eps: float, rope: Tensor) -> QKV:
        """Queries, keys and values [B, L, H, D] of x [B, L, C] after its norm (`fused.norm` by mul and add), queries
        and keys turned by rope [L, 1, D/2, 2]; quantised where `attend` takes FP8.

        The norm is made here, so that its result is freed before attention needs the memory."""
        h = shared_input(self.q, fused.norm(x, mul, add, eps, input_format(self.q)))
        if self.attend.takes_fp8:
            return self.project_fp8(h, rope)
        q = fused.head_norm(self.q(h), self.norm_q.weight, self.heads, self.eps, rope)
        k = fused.head_norm(self.k(h), self.norm_k.weight, self.heads, self.eps, rope)
        return q, k, self.v(h).unflatten(-1, (self.heads, -1))

    def project_fp8(self, h: Any, rope: Tensor) -> tuple[Fp8, Fp8, Fp8]:
        """Norm, rotation and quantisation in one pass, in the layout that `attend` wants."""
        block, agree = self.attend.block, self.attend.agree
        q = fused.head_norm_fp8(self.q(h), self.norm_q.weight, self.heads, self.eps, rope, block=block)
        k = fused.head_norm_fp8(
            self.k(h), self.norm_k.weight, self.heads, self.eps, rope, centre=True, block=block, agree=agree
        )
        v = self.v(h)
        if block:
            return q, k, quantize_values(v, self.heads, block)
        quantized = fused.quantize(v, "tensor", agree)
        return q, k, Quantized(quantized.data.unflatten(-1, (self.heads, -1)), quantized.scale)

    def attended(self, qkv: QKV, call: AttentionCall, dtype: torch.dtype) -> Tensor:
        """What `project` gave -> attention and its output projection, [B, L, C] in `dtype`. Queries, keys and values
        are freed before the projection needs memory. FP8 goes into the projection as it is where that takes it."""
        q, k, v = qkv
        del qkv
        if not self.attend.takes_fp8:
            out = self.attend(q, k, v, call).flatten(-2)  # type: ignore[arg-type]
            del q, k, v
            return self.o(out)
        out = self.attend.quantized(q, k, v, call)  # type: ignore[arg-type]
        del q, k, v
        joined = Quantized(out.data.flatten(-2), out.scale)
        takes_fp8 = isinstance(self.o, QuantLinear) and self.o.takes_fp8
        return self.o(joined if takes_fp8 else joined.dequantize(dtype))


class CrossAttention(AttentionLayer):
    """Attention of video tokens to text rows. Keys and values do not depend on the step: `kv` runs once per prompt.

    Where a `PreparedText` has a negative prompt too, its keys and values, with the numbers of `nag`, follow the others.
    """

    def kv(self, text: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [B, S, H, D] of embedded text [B, S, C]."""
        k = fused.head_norm(self.k(text), self.norm_k.weight, self.heads, self.eps)
        return k, self.v(text).unflatten(-1, (self.heads, -1))

    def forward(self, x: Tensor | Quantized, kv: tuple[Tensor, ...], bias: TokenBias | None = None) -> Tensor:
        """x [B, L, C], kv two of [B, S, H, D], and what `nag` needs -> [B, L, C]."""
        q = fused.head_norm(self.q(x), self.norm_q.weight, self.heads, self.eps)
        k, v, *negative = kv
        out = self.text_attention(q, k, v, negative, bias)
        del q
        return self.o(out)

    def text_attention(
        self, q: Tensor, k: Tensor, v: Tensor, negative: list[Tensor], bias: TokenBias | None = None
    ) -> Tensor:
        """Attention of q [B, L, H, D] to text, [B, L, C]. negative: of `nag`: keys and values, and its numbers. bias:
        added to the scores of the text, not to those of the negative one."""
        out = (self.attend(q, k, v) if bias is None else biased_attention(q, k, v, bias)).flatten(-2)
        if not negative:
            return out
        keys, values, numbers = negative
        return nag(out, self.attend(q, keys, values).flatten(-2), numbers)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: TokenBias) -> Tensor:
    """Attention of q [B, L, H, D] to text, with a bias that is made for some tokens at a time of their frames'."""
    if torch.compiler.is_compiling():
        return biased(q, k, v, bias.rows[:, bias.frames])
    parts = zip(q.split(NAG_TOKENS, 1), bias.frames.split(NAG_TOKENS), strict=True)
    return torch.cat([biased(some, k, v, bias.rows[:, frames]) for some, frames in parts], 1)


def nag(positive: Tensor, negative: Tensor, numbers: Tensor) -> Tensor:
    """Normalized attention guidance of attention to a prompt and to a negative prompt, [B, L, C]; `positive` may be
    overwritten. In float32, because it amplifies a difference; some tokens at a time, but for a compiler, which keeps
    nothing of it in memory. Source: Chen et al. 2025, arXiv:2505.21179.

    numbers: float32 [3], scale, tau and alpha.
    """
    if torch.compiler.is_compiling():
        return nag_rows(positive, negative, numbers)
    for rows, away in zip(positive.split(NAG_TOKENS, 1), negative.split(NAG_TOKENS, 1), strict=True):
        rows.copy_(nag_rows(rows, away, numbers))
    return positive


def nag_rows(positive: Tensor, negative: Tensor, numbers: Tensor) -> Tensor:
    scale, tau, alpha = numbers.unbind()
    out, away = positive.float(), negative.float()
    guided = out + (out - away) * (scale - 1)
    norm, grown = (one.abs().sum(-1, keepdim=True).clamp_min(1e-6) for one in (out, guided))
    guided = guided * (torch.minimum(grown / norm, tau) * norm / grown)
    return torch.lerp(out, guided, alpha).to(positive.dtype)


class Block(nn.Module):
    """Self-attention, cross-attention and feed-forward; the first and last shifted, scaled and gated by the timestep.

    Between the matrix products stand fused passes over memory (`wan_core.ops.kernels.fused`), which hand the next
    product its input in the format that it multiplies.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.randn(1, 6, config.dim).mul_(config.dim**-0.5))
        self.self_attn = SelfAttention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)  # the official name: it stands before cross-attention
        self.cross_attn = CrossAttention(config)
        self.ffn = nn.Sequential(
            Linear(config.dim, config.ffn_dim), nn.GELU(approximate="tanh"), Linear(config.ffn_dim, config.dim)
        )
        self.parts = PLAIN_PARTS

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        rope: Tensor,
        kv: tuple[Tensor, ...],
        call: AttentionCall = SINGLE,
        bias: TokenBias | None = None,
    ) -> Tensor:
        """x [B, L, C], which may be overwritten; modulation float32 [B, F, 6, C]; rope [L, 1, D/2, 2]; kv two of
        [B, S, H, D]; call: which call of attention this is; bias: of cross-attention -> [B, L, C].

        Attention stands between the two parts that a compiler may take: it alone depends on the layer and the step."""
        modulation = self.modulation.float() + modulation
        # No names for what is handed on: each part frees its input before it needs the memory.
        before, attended, after = self.parts.before, self.self_attn.attended, self.parts.after
        return after(self, x, attended(before(self, x, modulation, rope), call, x.dtype), modulation, kv, bias)

    def before_attention(self, x: Tensor, modulation: Tensor, rope: Tensor) -> QKV:
        shift, scale = modulation.unbind(2)[:2]
        return self.self_attn.project(x, 1 + scale, shift, self.eps, rope)

    def after_attention(
        self,
        x: Tensor,
        attended: Tensor,
        modulation: Tensor,
        kv: tuple[Tensor, ...],
        bias: TokenBias | None = None,
    ) -> Tensor:
        """The rest of the block, from what self-attention gave, [B, L, C]."""
        _, _, gate_a, shift_f, scale_f, gate_f = modulation.unbind(2)
        mul, add = (p.float().view(1, 1, -1) for p in (self.norm3.weight, self.norm3.bias))
        x, h = fused.residual_norm(x, attended, gate_a, mul, add, self.eps, input_format(self.cross_attn.q))
        del attended
        h = self.cross_attn(h, kv, bias)
        x, h = fused.residual_norm(x, h, None, 1 + scale_f, shift_f, self.eps, input_format(self.ffn[0]))
        return self.feed_forward(x, h, gate_f)

    def feed_forward(self, x: Tensor, h: Tensor | Quantized, gate: Tensor) -> Tensor:
        """x + gate * the feed-forward of its norm h. In two halves where there are many tokens: the hidden layer is the
        largest tensor of a forward, and half of it still fills the device. Not in a compiled block, where a limit would
        be a reason to compile again."""
        split = x.shape[:1] == gate.shape[:1] == (1,) and gate.shape[1] == 1 and fused.runs_kernel(x)
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


class BlockParts(NamedTuple):
    """A block's parts around attention, as functions of a block: what is compiled for one serves all blocks."""

    before: Callable[[Block, Tensor, Tensor, Tensor], QKV]
    after: Callable[[Block, Tensor, Tensor, Tensor, tuple[Tensor, ...], TokenBias | None], Tensor]


PLAIN_PARTS = BlockParts(Block.before_attention, Block.after_attention)


def input_format(linear: nn.Module) -> Format | None:
    """The FP8 format that `linear` wants its input in; None for plain numbers."""
    return linear.fmt if isinstance(linear, QuantLinear) else None


def shared_input(linear: nn.Module, x: Any) -> Any:
    """x as `linear` multiplies it, made once where several linears of a kind share it (q, k, v)."""
    return linear.quantize(x) if isinstance(linear, QuantLinear) and isinstance(x, Tensor) else x


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
        projected = [self.project(part, 1 + scale[:, f], shift[:, f]) for part, f in zip(parts, rows, strict=True)]
        return torch.cat(projected, 1)

    def project(self, x: Tensor, mul: Tensor, add: Tensor) -> Tensor:
        normed = scaled_norm(x, mul, add, self.eps)
        with tf32(x.dtype == torch.bfloat16):  # ten bits of mantissa, where what comes in has eight
            return F.linear(normed, self.head.weight.float(), self.head.bias.float())


def timestep_embedding(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoids of `timestep` [...], 0..1000: float32 [..., dim], cosines first. In float64: 999 is not 1000."""
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angle = timestep.double()[..., None] * 10000.0**-exponent
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


THETA = 10000.0


def rope_table(
    grid: tuple[int, int, int],
    axes: tuple[int, int, int],
    device: torch.device | str = "cpu",
    start: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """The rotation of every token of `grid` (T, Y, X): float32 [L, 1, D/2, 2] holding (cos, sin). start: the position
    of the first token.

    A head's D channels are D/2 interleaved pairs, each rotated as a complex number. The first pairs turn with the
    frame, the next with the row, the last with the column (22/21/21 pairs at D = 128). Source:
    Wan2.2/wan/modules/model.py, rope_params, rope_apply.

    Computed in float64 on the device itself and rounded once: at 1,000 positions float32 angles would already be off in
    the fourth digit.
    """
    where = (range(first, first + count) for first, count in zip(start, grid, strict=True))
    return rotations([torch.arange(one.start, one.stop, dtype=torch.float64, device=device) for one in where], axes)


def rotations(places: Sequence[Tensor], axes: tuple[int, int, int]) -> Tensor:
    """`rope_table` of the tokens at all combinations of the places in time, rows and columns, float64 [T], [Y], [X]."""
    angles = []
    for axis, (where, channels) in enumerate(zip(places, axes, strict=True)):
        frequency = THETA ** -(torch.arange(0, channels, 2, dtype=torch.float64, device=where.device) / channels)
        shape = [1, 1, 1, -1]
        shape[axis] = len(where)
        angles.append(torch.outer(where, frequency).view(shape).expand(*map(len, places), -1))
    angle = torch.cat(angles, -1).flatten(0, 2)[:, None]
    return torch.stack([angle.cos(), angle.sin()], dim=-1).float()
