"""Block-sparse attention through torch's FlexAttention, compiled: any NVIDIA GPU from Ampere on, and slower than the
kernels that are made for one.

Legend: B batch, L tokens, H heads, D head dim, n blocks, K blocks kept.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.attention.sparse.routing import Route
from wan_core.ops.custom_ops import allow_variants

VARIANTS = 64  # lengths of queries and of keys in one process; the parts of a ring are up to three lengths of a video


def sparse_flex(q: Tensor, k: Tensor, v: Tensor, route: Route, block: int) -> tuple[Tensor, Tensor]:
    """q, k, v [B, L, H, D] -> [B, L, H, D] and log-sum-exp float32 [B, H, L]."""
    heads = (t.transpose(1, 2) for t in (q, k, v))
    found = _flex(q.device.type)(*heads, block_mask=block_mask(route, q.shape[1], k.shape[1], block), **_wanted())
    out, more = found
    return out.transpose(1, 2).contiguous(), more if isinstance(more, Tensor) else more.lse


def block_mask(route: Route, queries: int, keys: int, block: int) -> Any:
    """`route` as FlexAttention reads it: blocks that are whole, and a last one that is not, to be masked inside.

    Inside a whole block it looks at nothing: there, keys behind the last one would count as zeros.
    """
    from torch.nn.attention.flex_attention import BlockMask

    blocks = route.blocks
    counts = route.counts
    if counts is None:
        counts = torch.full(blocks.shape[:-1], blocks.shape[-1], dtype=torch.int32, device=blocks.device)
    width = -(-keys // block)
    parts, part = torch.zeros_like(counts), torch.zeros_like(counts)
    if keys % block:
        blocks, counts, parts = without_last(blocks, counts, width - 1)
        part = torch.full_like(counts, width - 1)
    kept = route.kept(width)
    compiled = blocks.is_cuda

    def inside(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        # What is not compiled asks for every pair, what is compiled only in the last block.
        return column < keys if compiled else kept[b, h, row // block, column // block]

    return BlockMask(
        seq_lengths=(queries, keys),
        kv_num_blocks=parts.contiguous(),
        kv_indices=F.pad(part[..., None], (0, width - 1)).contiguous(),
        full_kv_num_blocks=counts.contiguous(),
        full_kv_indices=F.pad(blocks, (0, width - blocks.shape[-1])).contiguous(),
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(block, block),
        mask_mod=inside,
    )


def without_last(blocks: Tensor, counts: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of blocks, the first `counts` of which count, with block `last` taken out: the others, how many they are,
    and 1 where it was there. blocks: int32 [..., K]; counts: int32 [...]."""
    there = (blocks == last) & (torch.arange(blocks.shape[-1], device=blocks.device) < counts[..., None])
    found = there.any(-1).to(counts.dtype)
    final = blocks.gather(-1, (counts[..., None] - 1).long())  # takes its place
    return torch.where(there, final, blocks), counts - found, found


@functools.cache
def _flex(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cuda":
        allow_variants(VARIANTS)  # uncompiled it reads more than the route says
    # Sizes are fixed when it is compiled: a few lengths of video are seen, and kernels for any length are slower.
    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention


@functools.cache
def _wanted() -> dict[str, Any]:
    """How this torch is asked for the log-sum-exp."""
    import inspect

    from torch.nn.attention import flex_attention

    parameters = inspect.signature(flex_attention.flex_attention).parameters
    if "return_aux" in parameters:
        return {"return_aux": flex_attention.AuxRequest(lse=True)}
    return {"return_lse": True}
