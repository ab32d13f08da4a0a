"""Block-sparse attention of nvidia-cudnn-frontend (CuTe DSL kernels, blocks of 128): bf16 on Hopper and newer, FP8 on
Hopper.

The bf16 kernel reads q, k, v [B, L, H, D] as they lie, knows where the keys end, and takes as many blocks for a row as
the row has. The FP8 kernel is called below the library's public function, which would copy q, k and v by heads,
quantise them anew, and keep the log-sum-exp to itself: here they are written as it reads them
(`wan_core.ops.kernels.blocked`). It takes whole blocks only, the same number for every row, so the last block ends in
keys of zeros; `finish` takes their weight out again, exactly, by the log-sum-exp.

Legend: B batch, L tokens, S tokens rounded up to whole blocks, H heads, D head dim, n blocks, K blocks kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.ops.attention.sparse.routing import Route
from wan_core.ops.cards import BLACKWELL, capability
from wan_core.ops.kernels.block_layout import Blocked

BLOCK = 128


def sparse_bf16(q: Tensor, k: Tensor, v: Tensor, route: Route, block: int) -> tuple[Tensor, Tensor]:
    """q, k, v [B, L, H, D] -> [B, L, H, D] and log-sum-exp float32 [B, H, L]."""
    from cudnn.block_sparse_attention import (  # pyright: ignore[reportMissingImports]
        block_sparse_attention_forward,
    )

    counts = route.counts
    if counts is None and (capability(q.device) or (0, 0)) >= BLACKWELL:
        # Blackwell's kernel wants an even number where it is the same for all rows.
        counts = torch.full(route.blocks.shape[:-1], route.blocks.shape[-1], dtype=torch.int32, device=q.device)
    # Rows must begin at multiples of 16 bytes, which a view into a fused projection's output need not.
    q, k, v = (t if _aligned(t) else t.contiguous() for t in (q, k, v))
    found = block_sparse_attention_forward(
        q, k, v, route.blocks.contiguous(), q2k_block_nums=counts, sparse_block_size=block, layout="bshd"
    )
    return found["o_tensor"], found["lse_tensor"]


def sparse_fp8(q: Blocked, k: Blocked, v: Blocked, route: Route, block: int) -> tuple[Tensor, Tensor]:
    """q and k with memory [B, H, S, D], v with memory [B, H, D, S], one scale each, zeros after the tokens.

    -> bf16, a view [B, L, H, D], and log-sum-exp float32 [B, H, S], in both of which the keys of zeros count."""
    from cudnn.block_sparse_attention import _interface  # pyright: ignore[reportMissingImports]

    batch, heads, size, dim = q.memory.shape
    assert route.counts is None, "the FP8 kernel reads the same number of blocks for every row"
    out, lse = _interface._bsa_attn_fwd_sm90_fp8_blk128(
        q.memory,
        k.memory,
        v.memory,
        q.scale.expand(batch * heads * size).reshape(batch, heads, size).contiguous(),
        k.scale.expand(batch * heads * size // 16).reshape(batch, heads, size // 16).contiguous(),
        v.scale.expand(heads * dim).reshape(heads, dim).contiguous(),
        route.blocks.contiguous(),
        route.blocks.shape[-1],
        dim**-0.5,
    )
    return out[:, :, : q.tokens].transpose(1, 2), lse


def why_not_fp8() -> str | None:
    """None where the FP8 kernel can be called as it is here, below the library's public function."""
    try:
        from cudnn.block_sparse_attention import _interface  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError) as fault:
        reason = (str(fault).splitlines() or [type(fault).__name__])[0]
        install = "pip install nvidia-cudnn-frontend nvidia-cutlass-dsl"
        return f"its block-sparse kernels cannot be imported ({reason}): {install}"
    if not hasattr(_interface, "_bsa_attn_fwd_sm90_fp8_blk128"):
        return "this version of nvidia-cudnn-frontend has other block-sparse kernels: use 1.32"
    return None


def _aligned(x: Tensor) -> bool:
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for n, stride in outer if n > 1)
