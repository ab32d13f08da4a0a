"""Attention through torch: its own choice of kernel, cuDNN's by name, and the formula.

Legend: B batch, L query tokens, S key tokens, H heads, D head dim. q [B, L, H, D], k and v [B, S, H, D], any strides
with D contiguous; the result is [B, L, H, D]. The `_lse` forms also return the natural logarithm of the sum of
exponentials of the scaled scores, float32 [B, H, L], from which attention over parts of the keys can be merged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.attention.protocol import Dense

aten = torch.ops.aten


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, L, H, D] -> [B, H, L, D], no copy


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v by whichever kernel torch chooses."""
    return F.scaled_dot_product_attention(*_heads_first(q, k, v)).transpose(1, 2)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v. bias: [1 or B, L, S], the same for all heads."""
    mask = bias[:, None].to(q.dtype)
    return F.scaled_dot_product_attention(*_heads_first(q, k, v), attn_mask=mask).transpose(1, 2)


def sdpa_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `sdpa` and its log-sum-exp. The public function does not return the log-sum-exp, so its kernels are
    called by name: FlashAttention in half precision, the memory-efficient kernel in float32, the CPU's own on a CPU,
    and the formula elsewhere."""
    heads = _heads_first(q, k, v)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads)
    elif q.device.type != "cuda":
        return math_lse(q, k, v)
    elif q.dtype == torch.float32:
        out, lse = aten._scaled_dot_product_efficient_attention(*heads, None, True)[:2]
        lse = lse[..., : q.shape[1]]  # it rounds the number of rows up to 32
    else:
        out, lse = aten._scaled_dot_product_flash_attention(*heads)[:2]
    return out.transpose(1, 2), lse


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by cuDNN's kernel, called by name: it raises where that cannot run, and takes no slower kernel."""
    return aten._scaled_dot_product_cudnn_attention(*_heads_first(q, k, v), None, False)[0].transpose(1, 2)


def cudnn_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_cudnn_attention(*_heads_first(q, k, v), None, True)[:2]
    return out.transpose(1, 2), lse.reshape(out.shape[:3])  # [B, H, L, 1] in some versions


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return (q.transpose(1, 2).float() * q.shape[-1] ** -0.5) @ k.permute(0, 2, 3, 1).float()  # [B, H, L, S]


def math_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook formula in float32, holding the whole [L, S] matrix: what every backend is compared with."""
    return (_scores(q, k).softmax(-1) @ v.transpose(1, 2).float()).transpose(1, 2).type_as(v)


def math_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return math_reference(q, k, v), _scores(q, k).logsumexp(-1)


SDPA = Dense(sdpa, sdpa_lse)
"""What every attention is until a backend is chosen."""
