"""FP8 attention kernels of libraries, Hopper and newer: cuDNN's graph interface (nvidia-cudnn-frontend) and Transformer
Engine's call into cuDNN, with tensors and scales that are ours.

A cuDNN graph is built for one set of shapes and strides (a fraction of a second) and kept; views of a fused q, k, v
tensor are read in place. On Hopper it writes FP8 only, which is what an FP8 output projection reads.

The kernel computes exp(score - maximum) in 0..1, rounds it to E4M3 and multiplies by v. `SOFTMAX_SCALE` moves that
range up, so that what is far below a row's largest weight does not round to nothing. On random data 1 to 448 made no
difference.

Transformer Engine's usual way in, `DotProductAttention` under `autocast`, keeps delayed scales that only a training
step updates: at inference they stay 1.0 for ever. So the function below that module is called with FP8 tensors whose
scales were taken from the data a moment ago, and with an output scale that cannot overflow (see fp8.py).

Legend and layouts as in sdpa.py. Source: docs.nvidia.com/deeplearning/cudnn/frontend, operation "SDPA FP8", and
transformer_engine/pytorch/cpp_extensions/fused_attn.py.
"""

from __future__ import annotations

import atexit
import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wan_core.ops.attention.fp8 import Fp8Attention
from wan_core.ops.kernels.formats import FP8, Quantized

SOFTMAX_SCALE = 256.0

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides, [B, H, L, D] as cuDNN names dimensions


def cudnn_kernel(q: Quantized, k: Quantized, v: Quantized) -> Quantized:
    return Quantized(_run_cudnn((q, k, v), with_lse=False)[0], v.scale)


def cudnn_kernel_lse(q: Quantized, k: Quantized, v: Quantized) -> tuple[Quantized, Tensor]:
    out, lse = _run_cudnn((q, k, v), with_lse=True)
    return Quantized(out, v.scale), lse


def cudnn_fp8() -> Fp8Attention:
    return Fp8Attention(cudnn_kernel, cudnn_kernel_lse)


@dataclass(frozen=True)
class Graph:
    """A built cuDNN graph, its tensors by name, and the bytes of scratch memory a run needs."""

    graph: Any
    tensors: dict[str, Any]
    workspace: int


@functools.lru_cache(maxsize=64)
def _graph(q: Layout, k: Layout, v: Layout, with_lse: bool, device: int, thread: int) -> Graph:
    import cudnn  # pyright: ignore[reportMissingImports]

    kinds = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=_handle(device, thread),
    )

    def scalar(name: str) -> Any:
        return graph.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kinds.FLOAT, name=name)

    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    tensors = {name: scalar(name) for name in names}
    for name, (shape, stride) in zip("qkv", (q, k, v), strict=True):
        tensors[name] = graph.tensor(dim=list(shape), stride=list(stride), data_type=kinds.FP8_E4M3, name=name)
    out, stats, largest_s, largest_o = graph.sdpa_fp8(
        **tensors, attn_scale=q[0][-1] ** -0.5, generate_stats=with_lse, name="cudnn_fp8"
    )
    batch, heads, length, dim = q[0]
    out.set_output(True).set_dim(list(q[0])).set_stride([length * heads * dim, dim, heads * dim, 1])
    tensors["out"] = out.set_data_type(kinds.FP8_E4M3)
    for name, amax in (
        ("amax_s", largest_s),
        ("amax_o", largest_o),
    ):  # of no use here, but the cudnn_kernel writes them
        amax.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
        tensors[name] = amax.set_data_type(kinds.FLOAT)
    if with_lse:
        stats.set_output(True).set_dim([batch, heads, length, 1]).set_stride([heads * length, length, 1, 1])
        tensors["stats"] = stats.set_data_type(kinds.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return Graph(graph, tensors, graph.get_workspace_size())


# Graphs that are still there when Python's modules go are reported as leaks, in many lines, on the user's terminal.
atexit.register(_graph.cache_clear)


@functools.cache
def _handle(device: int, thread: int) -> Any:
    """cuDNN's handle, one for each device and thread: two threads may not share one."""
    import cudnn  # pyright: ignore[reportMissingImports]

    return cudnn.create_handle()


@functools.cache
def _softmax_scales(device: torch.device) -> tuple[Tensor, Tensor]:
    """The scale of the probabilities and its inverse, float32 [1] on the device."""
    return torch.full((1,), SOFTMAX_SCALE, device=device), torch.full((1,), 1 / SOFTMAX_SCALE, device=device)


def _run_cudnn(qkv: tuple[Quantized, Quantized, Quantized], with_lse: bool) -> tuple[Tensor, Tensor]:
    """FP8 data with scales [1] -> (FP8 [B, L, H, D] under v's scale, log-sum-exp float32 [B, H, L], empty unless
    `with_lse`)."""
    import cudnn  # pyright: ignore[reportMissingImports]

    q, k, v = (x.data if x.data.stride(-1) == 1 else x.data.contiguous() for x in qkv)
    scales = [x.scale for x in qkv]
    batch, length, heads, _ = q.shape
    device, thread = q.device.index, threading.get_ident()
    with torch.cuda.device(q.device):
        entry = _graph(_layout(q), _layout(k), _layout(v), with_lse, device, thread)
        handle = _handle(device, thread)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        out = torch.empty(q.shape, dtype=FP8, device=q.device)
        lse = torch.empty((batch, heads, length) if with_lse else 0, dtype=torch.float32, device=q.device)
        amax = torch.empty(2, dtype=torch.float32, device=q.device)
        scale_s, descale_s = _softmax_scales(q.device)
        arguments = {"q": q, "k": k, "v": v, "out": out, "scale_s": scale_s, "descale_s": descale_s}
        arguments |= {"scale_o": scales[2].reciprocal(), "amax_s": amax[:1], "amax_o": amax[1:]}
        arguments |= dict(zip(("descale_q", "descale_k", "descale_v"), scales, strict=True))
        if with_lse:
            arguments["stats"] = lse
        workspace = torch.empty(max(entry.workspace, 1), dtype=torch.uint8, device=q.device)
        # Addresses rather than tensors: not every version of the library can be handed an FP8 tensor.
        pack = {entry.tensors[name]: tensor.data_ptr() for name, tensor in arguments.items()}
        entry.graph.execute(pack, workspace, handle=handle)
    return out, lse


def _layout(x: Tensor) -> Layout:
    heads_first = x.transpose(1, 2)  # [B, H, L, D]
    return tuple(heads_first.shape), tuple(heads_first.stride())


def te_kernel(queries: Quantized, keys: Quantized, values: Quantized) -> Quantized:
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


def te_fp8() -> Fp8Attention:
    return Fp8Attention(te_kernel, capturable=False)  # it draws from a generator, which a graph would have to know
