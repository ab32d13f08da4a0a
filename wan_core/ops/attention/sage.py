"""SageAttention: q and k in int8 with a scale for each block, K's mean removed. It changes numbers, by name only.

Legend and layouts as in sdpa.py. Source: github.com/thu-ml/SageAttention, sageattention/core.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.ops.custom_ops import refuse_gradients


def sage(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    refuse_gradients("SageAttention", q, k, v)
    from sageattention import sageattn  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(q.device):  # Triton launches on the current device
        return sageattn(q, k, v, tensor_layout="NHD", is_causal=False).contiguous()
