"""FlashAttention 2 (flash-attn): Ampere and newer. torch carries the same algorithm; this is the library's own build.

Legend and layouts as in sdpa.py. Source: github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py.
"""

from __future__ import annotations

from torch import Tensor


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    # `return_attn_probs` brings the log-sum-exp; without dropout no matrix of probabilities is made.
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    # Some versions round the rows of lse up; out follows the strides of q.
    return out.contiguous(), lse[..., : q.shape[1]].contiguous()


def flash2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _forward(q, k, v)[0]


def flash2_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v)
