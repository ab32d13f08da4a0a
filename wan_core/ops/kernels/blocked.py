"""Passes around block-sparse attention: the layout that its FP8 kernel reads, means of blocks, and the last pass over
its output. Triton on an NVIDIA GPU, plain torch everywhere else.

The FP8 kernel wants q and k as [B, H, S, D] and v as [B, H, D, S], contiguous, S the number of tokens rounded up to
whole blocks. Everything else knows [B, L, H, D]. `Blocked` carries such memory and the number of real tokens: the
kernel reads its `memory`, everything else its `data`, and nothing is copied.

Legend: B batch, L tokens, S tokens with the tail, H heads, D head dim, C = H * D, n blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.ops.kernels import fused, reference
from wan_core.ops.kernels.block_layout import (
    Blocked,
    Pooled,
    channels_first,
    heads_first,
    padded,
    sizes_of,
)
from wan_core.ops.kernels.formats import FP8, FP8_MAX, Quantized


def quantize_heads_first(x: Tensor, block: int, offset: Tensor | None = None) -> Blocked:
    """x [B, L, H, D], less `offset` [B, 1, H, D] if given, in E4M3 with one scale."""
    shifted = x if offset is None else x - offset
    scale = (torch.linalg.vector_norm(shifted, float("inf"), dtype=torch.float32) / FP8_MAX).clamp(min=1e-12)
    return heads_first(reference.to_scale(shifted, scale.reshape(1)), block)


def quantize_values(x: Tensor, heads: int, block: int) -> Blocked:
    """v as a projection gives it, [B, L, C], in E4M3 with one scale, channels first."""
    if fused.runs_kernel(x, "tensor") and (x.shape[-1] // heads) % 16 == 0:
        from wan_core.ops.kernels import triton_blocked

        memory, scale = triton_blocked.quantize_values(x.contiguous(), heads, padded(x.shape[1], block))
        return Blocked(memory, scale, x.shape[1], channels_first=True)
    found = fused.quantize(x, "tensor")
    return channels_first(Quantized(found.data.unflatten(-1, (heads, -1)), found.scale), block)


def pool(x: Tensor, block: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Means and variances of the blocks of x [B, L, H, D] times `scale` [1], of the last block over the tokens that
    there are: two of float32 [B, H, n, D]."""
    if x.is_cuda and fused.uses_kernels() and fused.why_not(x.device) is None:
        from wan_core.ops.kernels import triton_blocked

        mean, variance = triton_blocked.pool(x, block)
    else:
        mean, variance = _pool(x.float(), block)
    return (mean, variance) if scale is None else (mean * scale, variance * scale.square())


def _pool(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    full = x.shape[1] // block * block
    parts = [x[:, :full].unflatten(1, (-1, block))] if full else []
    if full < x.shape[1]:
        parts.append(x[:, None, full:])
    means = [part.mean(2, dtype=torch.float32) for part in parts]  # torch.var_mean takes ten times as long on a CPU
    spread = [(part - mean[:, :, None]).square_().mean(2) for part, mean in zip(parts, means, strict=True)]
    return torch.cat(means, 1).transpose(1, 2), torch.cat(spread, 1).transpose(1, 2)


def without_pads(lse: Tensor, pads: int) -> Tensor:
    """The log-sum-exp of a row without the `pads` keys of zeros that it holds, each of which has score 0.

    Keys whose mean was removed give every query scores of mean 0 or near it, so by Jensen's inequality all of them
    together weigh at least their number: a few pads are a fraction of a percent and taking them off costs no digits.
    For the row in which they would be everything a floor holds."""
    return lse + torch.log1p(-(pads * torch.exp(-lse)).clamp(max=1 - 2.0**-10))


def finish(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    block: int,
    *,
    q_scale: Tensor | None = None,
    pads: int = 0,
    tail: Tensor | None = None,
    pooled: Pooled | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """What is left to do to `out` [B, L, H, D] of block-sparse attention with log-sum-exp `lse` [B, H, L or more].

    pads, tail: so many keys of zeros, with values of zeros, were read by the blocks of queries that `tail` bool
    [B, H, r] names; their weight is taken out. pooled: other blocks stand in by their means, with queries q
    [B, L, H, D] (times q_scale [1]). scale: [1], the result is FP8 in its units. Takes over `out`. -> contiguous
    [B, L, H, D].
    """
    if out.is_cuda and fused.uses_kernels() and fused.why_not(out.device) is None:
        from wan_core.ops.kernels import triton_blocked

        return triton_blocked.finish(out, lse, q, block, q_scale, pads, tail, pooled, scale)
    tokens = out.shape[1]
    lse = lse[..., :tokens]
    if pads:
        assert tail is not None
        less = torch.where(tail.repeat_interleave(block, -1)[..., :tokens], without_pads(lse, pads), lse)
        out, lse = out.float() * (lse - less).exp().transpose(1, 2)[..., None], less
    if pooled is not None:
        rows = q.float() if q_scale is None else q.float() * q_scale
        out = add_pooled(out, lse, rows, pooled, block)
    if scale is not None:
        return (out.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous()
    return out.to(q.dtype).contiguous()


def add_pooled(out: Tensor, lse: Tensor, q: Tensor, pooled: Pooled, block: int) -> Tensor:
    """`out` [B, L, H, D] of attention over the blocks that are kept, with log-sum-exp `lse`, once more with the others:
    each stands in as so many keys as it has, all of them the block's mean. Their mass stays in the softmax.

    A mean is worth less than the keys that it stands for (Jensen). Making up for that by their variance was tried and
    did harm: what stands out in a block has values of its own.
    """
    sizes = sizes_of(pooled, q, block).log()
    result = torch.empty_like(out)
    for head in range(q.shape[2]):
        scores = (q[:, :, head].float() @ pooled.keys[:, head].mT) * q.shape[-1] ** -0.5 + sizes  # [B, L, n]
        kept = pooled.kept[:, head].repeat_interleave(block, 1)[:, : q.shape[1]]
        scores = scores.masked_fill_(kept, float("-inf"))
        both = torch.logaddexp(lse[:, head], scores.logsumexp(-1))[..., None]  # [B, L, 1]
        rest = (scores - both).exp() @ pooled.values[:, head]
        result[:, :, head] = (out[:, :, head].float() * (lse[:, head, :, None] - both).exp() + rest).type_as(out)
    return result
