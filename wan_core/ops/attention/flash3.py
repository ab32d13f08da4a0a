"""FlashAttention 3 (flash_attn_interface, compiled from the `hopper` folder of its repository): Hopper only.

Legend and layouts as in sdpa.py. Source: github.com/Dao-AILab/flash-attention, hopper/flash_attn_interface.py.
"""

from __future__ import annotations

import inspect

from torch import Tensor


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    # Versions before the option always returned both.
    optional = "return_attn_probs" in inspect.signature(flash_attn_func).parameters
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True) if optional else flash_attn_func(q, k, v)
    return out.contiguous(), lse  # out follows the strides of q


def flash3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _forward(q, k, v)[0]


def flash3_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v)
