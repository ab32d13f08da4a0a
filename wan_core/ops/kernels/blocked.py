"""Passes around block-sparse attention: layouts that its FP8 kernel reads, means of blocks, and what is left to do to
its output. Triton on an NVIDIA GPU, plain torch everywhere else.

The FP8 kernel wants q and k as [B, H, S, D] and v as [B, H, D, S], contiguous, S the number of tokens rounded up to
whole blocks. Everything else here knows [B, L, H, D]. So these functions return tensors [B, L, H, D] that are views of
such memory, its tail zeros: who wants the whole takes it with `whole`, and nothing is copied.

Legend: B batch, L tokens, S tokens with the tail, H heads, D head dim, C = H * D, n blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wan_core.ops.kernels import fused
from wan_core.ops.kernels.formats import FP8, FP8_MAX, Quantized


def padded(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


def heads_first(x: Tensor, block: int) -> Tensor:
    """x [B, L, H, D] in memory [B, H, S, D] of zeros: a view [B, L, H, D]."""
    batch, tokens, heads, dim = x.shape
    memory = torch.zeros(batch, heads, padded(tokens, block), dim, dtype=x.dtype, device=x.device)
    view = memory[:, :, :tokens].transpose(1, 2)
    view.copy_(x)
    return view


def channels_first(x: Tensor, block: int) -> Tensor:
    """x [B, L, H, D] in memory [B, H, D, S] of zeros: a view [B, L, H, D]."""
    batch, tokens, heads, dim = x.shape
    memory = torch.zeros(batch, heads, dim, padded(tokens, block), dtype=x.dtype, device=x.device)
    view = memory[..., :tokens].permute(0, 3, 1, 2)
    view.copy_(x)
    return view


def whole(view: Tensor, block: int) -> Tensor | None:
    """The memory [B, H, S, D] or [B, H, D, S] that `view` [B, L, H, D] is a view of; None if it is none of these."""
    batch, tokens, heads, dim = view.shape
    size = padded(tokens, block)
    room = view.untyped_storage().nbytes() // view.element_size() - view.storage_offset() >= batch * heads * size * dim
    outer = heads * size * dim
    for shape, order in (((batch, heads, size, dim), (0, 2, 1, 3)), ((batch, heads, dim, size), (0, 3, 1, 2))):
        strides = (outer, size * dim, shape[3], 1)
        seen = tuple(strides[i] for i in order)
        same = all(a == b for n, a, b in zip(view.shape, view.stride(), seen, strict=True) if n > 1)
        if same and room:
            return view.as_strided(shape, strides)
    return None


def quantize_heads_first(x: Tensor, block: int, offset: Tensor | None = None) -> Quantized:
    """x [B, L, H, D], less `offset` [B, 1, H, D] if given, in E4M3 with one scale: a view of [B, H, S, D]."""
    from wan_core.ops.kernels.reference import to_scale

    shifted = x if offset is None else x - offset
    scale = (torch.linalg.vector_norm(shifted, float("inf"), dtype=torch.float32) / FP8_MAX).clamp(min=1e-12)
    data, scale = to_scale(shifted, scale.reshape(1))
    return Quantized(heads_first(data, block), scale)


def quantize_values(x: Tensor, heads: int, block: int) -> Quantized:
    """v as a projection gives it, [B, L, C], in E4M3 with one scale: a view [B, L, H, D] of [B, H, D, S]."""
    if fused.runs_kernel(x, "tensor") and (x.shape[-1] // heads) % 16 == 0:
        from wan_core.ops.kernels import triton_blocked

        return Quantized(*triton_blocked.quantize_values(x.contiguous(), heads, block))
    found = fused.quantize(x, "tensor")
    return Quantized(channels_first(found.data.unflatten(-1, (heads, -1)), block), found.scale)


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


class Pooled(NamedTuple):
    """What stands in for the blocks of keys that are left out: means of keys and values, float32 [B, H, n, D], and
    which blocks are kept and need none, bool [B, H, r, n] for r blocks of queries.

    sizes: int32 [n], the tokens of every block of keys; None: there are as many keys as queries."""

    keys: Tensor
    values: Tensor
    kept: Tensor
    sizes: Tensor | None = None


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


def sizes_of(pooled: Pooled, q: Tensor, block: int) -> Tensor:
    """int32 [n]: the tokens of the blocks of keys that queries q [B, L, H, D] attend to."""
    return block_sizes(q.shape[1], block, q.device) if pooled.sizes is None else pooled.sizes


def block_sizes(tokens: int, block: int, device: torch.device) -> Tensor:
    """int32 [n]: the tokens of every block."""
    count = -(-tokens // block)
    return (tokens - block * torch.arange(count, device=device, dtype=torch.int32)).clamp(max=block)
