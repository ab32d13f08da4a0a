"""Attention in FP8: how q, k and v become E4M3, the arithmetic in plain torch, and the kernel for Hopper and newer, by
cuDNN's graph interface (nvidia-cudnn-frontend).

Four things make FP8 attention usable:

- K's mean over the tokens is removed first. A vector added to every key adds the same number to every score of a
  query, which softmax ignores, so any constant vector is exact; the mean is what lets the rest use E4M3's eight binades
  on what differs between keys. Every 32nd token gives a mean that serves as well and costs nothing.
- Queries and keys are multiplied by the same Hadamard matrix, head by head, which leaves their products as they are.
  It spreads channels that are larger than the others: on the embedded model it halves the error (docs/log.md).
- Scales are loose. E4M3's relative error is the same over 15 binades, so queries and keys need no more than a bound:
  the longest row's length, which the matrix keeps. V's scale is a power of two: multiplying a bf16 tensor by it is
  exact, so there is one rounding, to FP8, in one pass.
- The output needs no measured scale: a weighted mean of rows of v is never larger than the largest of them, so v's
  scale cannot overflow.

A cuDNN graph is built for one set of shapes and strides (a fraction of a second) and kept; views of a fused q, k, v
tensor are read in place. On Hopper it writes FP8 only, which is what an FP8 output projection reads.

The kernel computes exp(score - maximum) in 0..1, rounds it to E4M3 and multiplies by v. `SOFTMAX_SCALE` moves that
range up, so that what is far below a row's largest weight does not round to nothing. On random data 1 to 448 made no
difference.

Legend: B batch, L query tokens, S key tokens, H heads, D head dim.
Source: docs.nvidia.com/deeplearning/cudnn/frontend, operation "SDPA FP8".
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wan_core.ops.attention.protocol import SINGLE, Attention, AttentionCall
from wan_core.ops.attention.sdpa import math_lse
from wan_core.ops.custom_ops import refuse_gradients
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.formats import FP8, FP8_MAX, Quantized
from wan_core.ops.kernels.fused import K_MEAN_EVERY
from wan_core.ops.kernels.reference import length_scale

Kernel = Callable[[Quantized, Quantized, Quantized, bool], tuple[Quantized, Tensor]]
"""FP8 q, k, v and whether the log-sum-exp is wanted -> attention under v's scale, and the log-sum-exp."""

SMALLEST_FP16 = 2.0**-7  # the same where the inverse must be a number in fp16
SMALLEST = 2.0**-100  # largest magnitude assumed of a tensor of zeros: its scale is then a number that has an inverse
EXPONENT = 0x7F800000  # the exponent bits of a float32


class Fp8Attention(Attention):
    """An FP8 kernel behind the protocol of every backend.

    Called with bf16 or fp16 q [B, L, H, D], k and v [B, S, H, D] it quantises them by itself and returns their dtype.
    `quantized` takes FP8 tensors that a fused kernel wrote (per-tensor scales [1], K's mean already removed, q and k
    times the Hadamard matrix) and returns FP8 [B, L, H, D], ready for an FP8 output projection. No call waits for the
    device.
    """

    takes_fp8 = True

    gives_lse = True

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> Tensor:
        refuse_gradients("FP8 attention", q, k, v)
        return _dequantize(self.quantized(quantize_mixed(q), quantize_mixed(k, key_mean(k)), quantize(v)), q.dtype)

    def quantized(self, q: Quantized, k: Quantized, v: Quantized, call: AttentionCall = SINGLE) -> Quantized:
        return self.kernel(q, k, v, False)[0]

    def quantized_lse(self, q: Quantized, k: Quantized, v: Quantized) -> tuple[Quantized, Tensor]:
        return self.kernel(q, k, v, True)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> tuple[Tensor, Tensor]:
        """Also the log-sum-exp float32 [B, H, L] of the scores with K as given: the mean that was taken from the keys
        is put back, because parts of a sequence that are merged have different means."""
        refuse_gradients("FP8 attention", q, k, v)
        mean = key_mean(k)
        out, lse = self.quantized_lse(quantize_mixed(q), quantize_mixed(k, mean), quantize(v))
        taken = (q * mean).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5  # [B, L, H]
        return _dequantize(out, q.dtype), lse + taken.transpose(1, 2)


def key_mean(k: Tensor) -> Tensor:
    """Roughly the mean over tokens of k [B, S, H, D]: [B, 1, H, D] in k's dtype. Rounding it does no harm."""
    return k[:, ::K_MEAN_EVERY].mean(1, keepdim=True, dtype=torch.float32).to(k.dtype)


def quantize_mixed(x: Tensor, mean: Tensor | None = None) -> Quantized:
    """Queries or keys x [B, L, H, D], less `mean` [B, 1, H, D] if given, times the Hadamard matrix, in E4M3."""
    mixed = fused.hadamard_fp8(x, length_scale(x, 1.0 if mean is None else 2.0), mean)
    assert isinstance(mixed, Quantized)
    return mixed


def quantize(x: Tensor) -> Quantized:
    """Values x [B, L, H, D] in E4M3 under one power of two, float32 [1].

    The largest magnitude lands in [64, 256): below 448, with no need to clamp and nothing near the subnormals.
    """
    smallest = SMALLEST_FP16 if x.dtype == torch.float16 else SMALLEST
    amax = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32).clamp(min=smallest)
    scale = (amax.reshape(1).view(torch.int32) & EXPONENT).view(torch.float32) * (2 / 256)  # 2^ceil(log2 amax) / 256
    return Quantized((x * (1 / scale).to(x.dtype)).to(FP8), scale)  # exact


def _dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    return x.data.to(dtype) * x.scale.to(dtype)  # exact in bf16: the scale is a power of two


# ------------------------------------------------------------------------------------------------------- the reference


def reference(q: Quantized, k: Quantized, v: Quantized) -> tuple[Quantized, Tensor]:
    """What an FP8 kernel computes: attention of the numbers that q, k and v hold, rounded to E4M3 under v's scale.

    A real kernel also rounds the probabilities to E4M3, which this does not.
    """
    out, lse = math_lse(*(x.dequantize() for x in (q, k, v)))
    return Quantized((out / v.scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), v.scale), lse


def math_fp8() -> Fp8Attention:
    """FP8 attention in plain torch, on any device: for tests."""
    return Fp8Attention(lambda q, k, v, with_lse: reference(q, k, v))


# ------------------------------------------------------------------------------------------------ kernels of libraries

SOFTMAX_SCALE = 256.0

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides, [B, H, L, D] as cuDNN names dimensions


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
    for name, amax in (("amax_s", largest_s), ("amax_o", largest_o)):  # of no use here, but the kernel writes them
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


def run_cudnn(queries: Quantized, keys: Quantized, values: Quantized, with_lse: bool) -> tuple[Quantized, Tensor]:
    """Scales [1] -> FP8 [B, L, H, D] under the values' scale, log-sum-exp float32 [B, H, L], empty if not wanted."""
    import cudnn  # pyright: ignore[reportMissingImports]

    qkv = queries, keys, values
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
    return Quantized(out, values.scale), lse


def _layout(x: Tensor) -> Layout:
    heads_first = x.transpose(1, 2)  # [B, H, L, D]
    return tuple(heads_first.shape), tuple(heads_first.stride())
