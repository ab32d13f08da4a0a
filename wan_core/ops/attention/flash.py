"""FlashAttention 2 (flash-attn, Ampere and newer) and 3 (flash_attn_interface, compiled from the `hopper` folder of its
repository, Hopper only). torch carries the algorithm of 2 as well; this is the library's own build.

Legend and layouts as in sdpa.py. Source: github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py and
hopper/flash_attn_interface.py.
"""

from __future__ import annotations

import inspect

from torch import Tensor


def flash2(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    # `return_attn_probs` brings the log-sum-exp; without dropout no matrix of probabilities is made.
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    # Some versions round the rows of lse up; out follows the strides of q.
    return out.contiguous(), lse[..., : q.shape[1]].contiguous()


def flash3(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    # Versions before the option always returned both.
    optional = "return_attn_probs" in inspect.signature(flash_attn_func).parameters
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True) if optional else flash_attn_func(q, k, v)
    return out.contiguous(), lse  # out follows the strides of q
