"""Block-sparse attention by our own kernel (Triton, Ampere and newer), the means of unselected blocks in the same pass.

Legend: B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.sparse.routing import Route
from wan_core.ops.kernels.block_layout import Pooled


def sparse_triton(
    q: Tensor, k: Tensor, v: Tensor, route: Route, block: int, pooled: Pooled | None = None
) -> tuple[Tensor, Tensor]:
    """q, k, v [B, L, H, D] -> [B, L, H, D] and log-sum-exp float32 [B, H, L], both of the means too."""
    from wan_core.ops.kernels import triton_attention

    return triton_attention.attention(q, k, v, blocks=route.blocks, counts=route.counts, block=block, pooled=pooled)


def sparse_triton_int8(
    q: Tensor, k: Tensor, v: Tensor, route: Route, block: int, pooled: Pooled | None = None
) -> tuple[Tensor, Tensor]:
    """The same with q and k in INT8."""
    from wan_core.ops.kernels import triton_attention

    return triton_attention.attention(
        q, k, v, centre=key_mean(k), blocks=route.blocks, counts=route.counts, block=block, pooled=pooled
    )
