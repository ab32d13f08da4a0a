"""Kernels of block-sparse attention by name: what each needs, whether it runs here, and the one that `auto` takes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wan_core.ops.attention.library import Library
from wan_core.ops.attention.registry import HALF, AttentionError, Implementation, Needs
from wan_core.ops.attention.sparse import implementations
from wan_core.ops.cards import AMPERE, HOPPER, capability, card_of
from wan_core.ops.kernels import fused

log = logging.getLogger(__name__)
Run = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v [B, L, H, D], route, block) -> [B, L, H, D] and its log-sum-exp, float32 [B, H, L]. With `means` also
(..., pooled)."""

BLOCK = 128  # of every kernel
SMALL = 4096  # tokens below which there is nothing to gain, and blocks are made smaller, in plain torch

CUDNN_SPARSE = Library(
    "nvidia-cudnn-frontend with its block-sparse kernels",
    "cudnn.block_sparse_attention",
    "block_sparse_attention_forward",
    "pip install 'nvidia-cudnn-frontend>=1.32' 'nvidia-cutlass-dsl>=4.6.2'",
)


@dataclass(frozen=True)
class SparseKernel(Implementation):
    """fp8: takes q, k and v as `Quantized`, laid out by heads in whole blocks, and its output goes through `finish`.
    any_block: takes blocks of any length; else 128. counts: rows may keep different numbers. means: takes a `Pooled`
    too, what replaces blocks that are not read, and adds it in the same pass."""

    fp8: bool = False
    any_block: bool = False
    counts: bool = True
    means: bool = False


KERNELS: dict[str, SparseKernel] = {
    kernel.name: kernel
    for kernel in (
        SparseKernel("cudnn-fp8", "cuDNN frontend, FP8, blocks of 128", lambda: implementations.sparse_fp8,
                     Needs(HOPPER, 9, HALF, (128,)),
                     lambda: CUDNN_SPARSE.why_not() or implementations.why_not_fp8(), fp8=True, counts=False),
        SparseKernel("cudnn", "cuDNN frontend, bf16, blocks of 128", lambda: implementations.sparse_bf16,
                     Needs(HOPPER, 12, HALF, (64, 128)), CUDNN_SPARSE.why_not),
        SparseKernel("flex", "torch's FlexAttention, blocks of 128", lambda: implementations.sparse_flex,
                     Needs(AMPERE, dtypes=HALF, head_dims=(16, 32, 64, 128)), fused.missing_triton),
        SparseKernel("triton", "our own kernel, bf16, blocks of 128", lambda: implementations.sparse_triton,
                     Needs(AMPERE, dtypes=HALF, head_dims=(16, 32, 64, 128)), fused.missing_triton, means=True),
        SparseKernel("triton-int8", "the same with q and k in int8", lambda: implementations.sparse_triton_int8,
                     Needs(AMPERE, dtypes=HALF, head_dims=(32, 64, 128)), fused.missing_triton, means=True),
        SparseKernel("math", "the formula, blocks of any length: for tests and small videos",
                     lambda: implementations.sparse_reference, any_block=True),
    )
}  # fmt: skip


def resolve_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int, *, fp8: bool, counts: bool = False
) -> SparseKernel:
    """The kernel called `name`. `auto`: FP8 where attention is FP8 anyway, else the fastest that runs.

    fp8: the dense backend takes FP8. counts: rows must be able to keep different numbers of blocks, by mass or in the
    parts of a ring. Raises AttentionError for one that is not known or cannot run.
    """
    if name == "auto":
        names = () if tokens < SMALL else card_of(capability(device)).sparse
        fits = (k for k in map(KERNELS.__getitem__, names) if not k.fp8 or (fp8 and not counts))
        chosen = next((k for k in fits if k.why_not(device, dtype, head_dim) is None), KERNELS["math"])
        if names and chosen.name == "math":
            _say_slow(device, KERNELS["flex"].why_not(device, dtype, head_dim))
        return chosen
    if name not in KERNELS:
        raise AttentionError(f"sparse kernel {name!r} is not known; use one of: auto, {', '.join(KERNELS)}")
    kernel = KERNELS[name]
    reason = kernel.why_not(device, dtype, head_dim)
    if reason is None and counts and not kernel.counts:
        reason = (
            "it reads the same number of blocks for every row: keep by top, not by mass, on a mesh without a ring, or "
            "use another kernel"
        )
    if reason is None and kernel.fp8 and not fp8:
        reason = "attention is not FP8: choose an FP8 backend (cudnn-fp8), or the sparse kernel cudnn"
    if reason is not None:
        raise AttentionError(f"sparse kernel {name!r} cannot run on {device}: {reason}")
    return kernel


@functools.cache
def _say_slow(device: torch.device, reason: str | None) -> None:
    """Once."""
    log.warning(
        "sparse attention: no kernel runs on %s (%s); plain torch is slower than dense attention", device, reason
    )


def block_length(kernel: SparseKernel, tokens: int) -> int:
    """128, or where any will do and there are few tokens, the power of two (2 or more) that makes 64 blocks of them.

    128 tokens are 1.8 % of the picture at 720p, two frames deep. The embedded model has 36 tokens a frame: blocks of 2
    are 5.6 % of it."""
    if not kernel.any_block or tokens >= SMALL:
        return BLOCK
    return max(2, 1 << (max(1, tokens // 64).bit_length() - 1))


def expected_block(name: str, tokens: int) -> int:
    """The block length of the kernel that `name` stands for, whatever runs here."""
    return block_length(KERNELS["math" if name == "auto" else name], tokens)  # auto: also where there are many
