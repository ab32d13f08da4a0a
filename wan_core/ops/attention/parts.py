"""Attention to parts of the keys, merged by their log-sum-exps: the result is that of one softmax over all of them.

Legend: B batch, N query tokens of a rank, h heads of a rank, D head dim, R parts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Partial outputs [B, N, h, D] with log-sum-exps float32 [B, h, N] -> the output, in their dtype. Where a part's
    is -inf the part has no weight."""
    if len(parts) == 1:
        return parts[0][0]
    # softmax over the parts: exp(lse - largest) / sum, which is numerators over one maximum, divided once
    weights = torch.stack([lse for _, lse in parts]).softmax(0).transpose(2, 3)[..., None]  # [R, B, N, h, 1]
    dtype = parts[0][0].dtype
    outs = [out.to(torch.bfloat16) if dtype.itemsize == 1 else out for out, _ in parts]  # E4M3 is exact in bf16
    total = outs[0] * weights[0]  # float32, as the weights are
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        total.addcmul_(out, weight)
    return total.to(dtype)


def merge_lse(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The result of `merge`, and the log-sum-exp of all parts together, float32 [B, h, N]."""
    if len(parts) == 1:
        return parts[0]
    return merge(parts), torch.stack([lse for _, lse in parts]).logsumexp(0)
