"""Passes before and after block-sparse attention: the FP8 kernel's memory layouts, means of blocks, and corrections of
its output. Triton on an NVIDIA GPU, plain torch everywhere else.

The FP8 kernel needs q and k as [B, H, S, D] and v as [B, H, D, S], contiguous, S the number of tokens rounded up to
whole blocks. All other code uses [B, L, H, D]. `Blocked` holds memory in the kernel's layout and the number of real
tokens: the kernel reads its `memory`, other code the view `data`, without a copy.

Legend: B batch, L tokens, S tokens with the tail, H heads, D head dim, C = H * D, n blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.kernels import fused, reference
from wan_core.ops.kernels.block_layout import Blocked, Pooled, channels_first, padded
from wan_core.ops.kernels.formats import FP8, FP8_MAX, Quantized


def quantize_heads_first(x: Tensor, block: int, mean: Tensor | None = None) -> Blocked:
    """Queries or keys x [B, L, H, D], less `mean` [B, 1, H, D], times the Hadamard matrix, in E4M3 with one scale."""
    blocked = fused.hadamard_fp8(x, reference.length_scale(x, 1.0 if mean is None else 2.0), mean, block)
    assert isinstance(blocked, Blocked)
    return blocked


def quantize_values(x: Tensor, heads: int, block: int) -> Blocked:
    """v [B, L, C], the output of its projection, in E4M3 with one scale, channels first."""
    if fused.runs_kernel(x, "tensor") and (x.shape[-1] // heads) % 16 == 0:
        from wan_core.ops.kernels import triton_blocked

        memory, scale = triton_blocked.quantize_values(x.contiguous(), heads, padded(x.shape[1], block))
        return Blocked(memory, scale, x.shape[1], channels_first=True)
    quantized = fused.quantize(x, "tensor")
    return channels_first(Quantized(quantized.data.unflatten(-1, (heads, -1)), quantized.scale), block)


def pool(x: Tensor, block: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(mean, variance), float32 [B, H, n, D] each, of every block of x [B, L, H, D] times `scale` [1]. The last block
    may be shorter; its statistics are over its own tokens."""
    if x.is_cuda and fused.triton_runs(x.device):
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
    variances = [(part - mean[:, :, None]).square_().mean(2) for part, mean in zip(parts, means, strict=True)]
    return torch.cat(means, 1).transpose(1, 2), torch.cat(variances, 1).transpose(1, 2)


def without_pads(lse: Tensor, pads: int) -> Tensor:
    """`lse` without the contribution of `pads` zero keys, each of which has score 0.

    The keys' mean was removed, so the scores of a query have a mean near 0, and by Jensen's inequality the sum of their
    exponentials is at least their number. A few pads are therefore a small fraction of it, and subtracting them loses
    no precision. A floor protects rows in which pads would be nearly everything."""
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
    """Correct the output `out` [B, L, H, D] of block-sparse attention with log-sum-exp `lse` [B, H, L or more].

    pads, tail: remove the weight of `pads` zero keys (with zero values), which the query blocks marked in `tail` bool
    [B, H, r] have read. pooled: add unselected blocks by their means, for queries q [B, L, H, D] (times q_scale [1]).
    scale: [1], quantise the result to FP8 with this scale. May overwrite `out`. -> contiguous [B, L, H, D].
    """
    if not pads and pooled is None and scale is None:  # nothing to correct
        return out.to(q.dtype).contiguous()
    if out.is_cuda and fused.triton_runs(out.device):
        from wan_core.ops.kernels import triton_blocked

        return triton_blocked.finish(out, lse, q, block, q_scale, pads, tail, pooled, scale)
    tokens = out.shape[1]
    lse = lse[..., :tokens]
    if pads:
        assert tail is not None
        corrected = torch.where(tail.repeat_interleave(block, -1)[..., :tokens], without_pads(lse, pads), lse)
        out, lse = out.float() * (lse - corrected).exp().transpose(1, 2)[..., None], corrected
    if pooled is not None:
        rows = q.float() if q_scale is None else q.float() * q_scale
        out = add_pooled(out, lse, rows, pooled, block)
    if scale is not None:
        return (out.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous()
    return out.to(q.dtype).contiguous()


def final_lse(
    lse: Tensor,
    q: Tensor,
    block: int,
    *,
    q_scale: Tensor | None = None,
    pads: int = 0,
    tail: Tensor | None = None,
    pooled: Pooled | None = None,
) -> Tensor:
    """The log-sum-exp, float32 [B, H, L], of what `finish` returns: attention to other keys is merged by it."""
    tokens = q.shape[1]
    log_sums = lse[..., :tokens].float()
    if pads:
        assert tail is not None
        log_sums = torch.where(tail.repeat_interleave(block, -1)[..., :tokens], without_pads(log_sums, pads), log_sums)
    if pooled is None:
        return log_sums
    rows = q.float() if q_scale is None else q.float() * q_scale
    totals = [total for _, total in pooled_scores(log_sums, rows, pooled, block)]
    return torch.cat(totals, -1).transpose(1, 2)


def pooled_scores(lse: Tensor, q: Tensor, pooled: Pooled, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For every head, float32: the scores of the means of unselected blocks [B, L, n], -inf for selected ones, and the
    log-sum-exp [B, L, 1] of these and of what was read."""
    sizes = pooled.sizes.log()
    for head in range(q.shape[2]):
        scores = (q[:, :, head].float() @ pooled.keys[:, head].mT) * q.shape[-1] ** -0.5 + sizes
        scores = scores.masked_fill_(pooled.kept[:, head].repeat_interleave(block, 1)[:, : q.shape[1]], float("-inf"))
        yield scores, torch.logaddexp(lse[:, head], scores.logsumexp(-1))[..., None]


def add_pooled(out: Tensor, lse: Tensor, q: Tensor, pooled: Pooled, block: int) -> Tensor:
    """`out` [B, L, H, D], attention over the selected blocks with log-sum-exp `lse`, extended by the unselected blocks.

    An unselected block counts as many times as it has keys, each key and value replaced by their means, so its
    mass stays in the softmax. The mean has less mass than the keys it replaces (Jensen's inequality). A
    correction by the keys' variance was tried and made results worse: keys with large scores have values that differ
    from the mean.
    """
    result = torch.empty_like(out)
    for head, (scores, total) in enumerate(pooled_scores(lse, q, pooled, block)):
        means = (scores - total).exp() @ pooled.values[:, head]
        read = (lse[:, head, :, None] - total).exp()
        if pooled.slopes is not None:
            means += (1 - read) * _along(q[:, :, head].float(), pooled.slopes[:, head], block)
        result[:, :, head] = (out[:, :, head].float() * read + means).type_as(out)
    return result


def _along(q: Tensor, slopes: Tensor, block: int) -> Tensor:
    """q [B, L, D] times the matrix of its row, slopes [B, r, D, D]: float32 [B, L, D]."""
    rows = F.pad(q, (0, 0, 0, -q.shape[1] % block)).unflatten(1, (-1, block))
    return (rows @ slopes.float()).flatten(1, 2)[:, : q.shape[1]]
