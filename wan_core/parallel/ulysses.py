"""Ulysses: ranks trade heads for tokens, so that each attends over all tokens with some of the heads.

q, k and v travel in one exchange, packed so that what arrives needs no sorting: a rank's tokens follow one another in
memory, and behind each token stand its query, key and value. The output goes back in one exchange more. Heads and
tokens need not divide: every rank says how many are whose.

Legend: B batch, n tokens of this rank, N tokens of all ranks of the group, H heads, h heads of this rank, D head dim.
Source: DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.parallel.mesh import Group, as_words, even_parts

Three = tuple[Tensor, Tensor, Tensor]


def heads_for_tokens(qkv: Three, lengths: list[int], group: Group) -> Three:
    """q, k, v [B, n, H, D] -> q, k, v [B, N, h, D], views of what arrived. lengths: tokens of each rank of `group`."""
    if group.size == 1:
        return qkv
    dtype, integers = qkv[0].dtype, [as_words(x) for x in qkv]
    B, n, H, D = integers[0].shape
    heads = even_parts(H, group.size)
    sizes = [n * B * 3 * h * D for h in heads]
    packed = integers[0].new_empty(sum(sizes))
    for i, x in enumerate(integers):
        x = x.transpose(0, 1)  # [n, B, H, D]
        if H % group.size == 0:
            into = packed.view(group.size, n, B, 3, heads[0], D)[:, :, :, i]
            into.copy_(x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4))
            continue
        for part, some in zip(packed.split(sizes), x.split(heads, 2), strict=True):
            part.view(n, B, 3, -1, D)[:, :, i].copy_(some)
    h = heads[group.index]
    arrived = packed.new_empty(sum(lengths), B, 3, h, D)
    all_to_all(arrived.flatten(), packed, [length * B * 3 * h * D for length in lengths], sizes, group)
    q, k, v = (x.transpose(0, 1) for x in arrived.view(dtype).unbind(2))
    return q, k, v


def tokens_for_heads(out: Tensor, heads_in_all: int, lengths: list[int], group: Group) -> Tensor:
    """The way back of the output: [B, N, h, D] -> [B, n, H, D], contiguous."""
    if group.size == 1:
        return out.contiguous()
    packed = as_words(out.transpose(0, 1).contiguous())  # [N, B, h, D]
    _, B, h, D = packed.shape
    heads, n = even_parts(heads_in_all, group.size), lengths[group.index]
    sizes = [n * B * some * D for some in heads]
    arrived = packed.new_empty(sum(sizes))
    all_to_all(arrived, packed.flatten(), sizes, [length * B * h * D for length in lengths], group)
    if heads_in_all % group.size == 0:
        joined = arrived.view(group.size, n, B, h, D).permute(2, 1, 0, 3, 4)
        return joined.flatten(2, 3).contiguous().view(out.dtype)
    pieces = [piece.view(n, B, -1, D) for piece in arrived.split(sizes)]
    return torch.cat(pieces, 2).transpose(0, 1).contiguous().view(out.dtype)


def all_to_all(into: Tensor, out: Tensor, arriving: list[int], leaving: list[int], group: Group) -> None:
    """Both flat; counts of numbers by rank."""
    if group.process is None:
        into.zero_()
        return
    dist.all_to_all_single(into, out, arriving, leaving, group=group.process)
