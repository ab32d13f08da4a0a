"""FP8 attention through Transformer Engine: its call into cuDNN, with tensors and scales that are ours.

The usual way in, `DotProductAttention` under `autocast`, keeps delayed scales that only a training step updates: at
inference they stay 1.0 for ever. So the function below that module is called with FP8 tensors whose scales were taken
from the data a moment ago, and with an output scale that cannot overflow (see fp8.py).

Legend and layouts as in sdpa.py. Source: transformer_engine/pytorch/cpp_extensions/fused_attn.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.ops.attention.fp8 import Fp8Attention
from wan_core.ops.kernels.formats import FP8, Quantized

SOFTMAX_SCALE = 256.0  # as in cudnn_fp8.py


def kernel(queries: Quantized, keys: Quantized, values: Quantized) -> Quantized:
    """FP8 data and scales [1] -> FP8 [B, L, H, D] under v's scale."""
    import transformer_engine_torch as tex  # pyright: ignore[reportMissingImports]
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_fwd  # pyright: ignore[reportMissingImports]
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor  # pyright: ignore[reportMissingImports]

    q, k = queries.data, keys.data

    def wrap(x: Quantized) -> Float8Tensor:
        data = x.data.contiguous().view(torch.uint8)  # its layouts are by name, and none of them has strides
        e4m3 = tex.DType.kFloat8E4M3
        return Float8Tensor(
            shape=data.shape, dtype=torch.bfloat16, data=data, fp8_scale_inv=x.scale, fp8_dtype=e4m3, device=data.device
        )

    def quantizer(scale: Tensor) -> Float8Quantizer:
        amax = torch.zeros(1, device=q.device)
        return Float8Quantizer(scale=scale, amax=amax, fp8_dtype=tex.DType.kFloat8E4M3, columnwise=False)

    def starts(length: int) -> Tensor:
        return torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * length

    softmax = quantizer(torch.full((1,), SOFTMAX_SCALE, device=q.device))
    softmax.internal = True
    with torch.cuda.device(q.device):
        out = fused_attn_fwd(
            is_training=False,
            max_seqlen_q=q.shape[1],
            max_seqlen_kv=k.shape[1],
            cu_seqlens_q=starts(q.shape[1]),
            cu_seqlens_kv=starts(k.shape[1]),
            q=wrap(queries),
            k=wrap(keys),
            v=wrap(values),
            fake_dtype=torch.bfloat16,
            fused_attention_backend=FusedAttnBackend["FP8"],
            s_quantizer=softmax,
            o_quantizer=quantizer(values.scale.reciprocal()),
            attn_scale=q.shape[-1] ** -0.5,
            qkv_layout="bshd_bshd_bshd",
            o_format="bshd",
            attn_mask_type="no_mask",
            # It draws from the generator even without dropout: not from the one that the user seeds.
            rng_gen=torch.Generator(q.device),
        )[0]
    return Quantized(out._data.view(FP8).view(q.shape), values.scale)


def attention() -> Fp8Attention:
    return Fp8Attention(kernel, capturable=False)  # it draws from a generator, which a graph would have to know
