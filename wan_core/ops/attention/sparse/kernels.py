"""Kernels of block-sparse attention by name: what each needs, whether it runs here, and the one that `auto` takes.

cuDNN (nvidia-cudnn-frontend, CuTe DSL kernels, blocks of 128) computes in bf16 on Hopper and newer, in FP8 on Hopper.
The bf16 kernel reads q, k, v [B, L, H, D] as they lie, and knows where the keys end. The FP8 kernel is called below the
library's public function, which would copy q, k and v by heads, quantise them anew, and keep the log-sum-exp to itself:
here they are written as it reads them (`wan_core.ops.kernels.blocked`). It takes whole blocks only, so the last block
ends in keys of zeros; `finish` takes their weight out again, exactly, by the log-sum-exp.

FlexAttention is compiled, runs on any NVIDIA GPU from Ampere on, and is slower than the kernels that are made for one.
The formula takes blocks of any length: kernels are tested against it, and it runs where there is none (a CPU, the
embedded model). It holds the scores of one head at a time, of `SCORES` at most.

Legend: B batch, L tokens, S tokens rounded up to whole blocks, H heads, D head dim, n blocks, K selected blocks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config.compile_cache import full_disk_explained
from wan_core.ops.attention.registry import HALF, AttentionError, Implementation, Needs
from wan_core.ops.attention.sparse.routing import Route
from wan_core.ops.cards import AMPERE, BLACKWELL, HOPPER, capability, card_of
from wan_core.ops.custom_ops import allow_variants
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.block_layout import Blocked
from wan_core.ops.library import Library

log = logging.getLogger(__name__)
Run = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v [B, L, H, D], route, block) -> [B, L, H, D] and its log-sum-exp, float32 [B, H, L]."""

BLOCK = 128  # of every kernel
SMALL = 4096  # tokens below which there is nothing to gain, and blocks are made smaller, in plain torch

CUDNN_SPARSE = Library(
    "nvidia-cudnn-frontend with its block-sparse kernels",
    "cudnn.block_sparse_attention",
    "block_sparse_attention_forward",
    "pip install 'nvidia-cudnn-frontend>=1.32' 'nvidia-cutlass-dsl>=4.6.2'",
)
# Below the library's public function, which need not be there in other versions.
CUDNN_SPARSE_FP8 = replace(
    CUDNN_SPARSE,
    module="cudnn.block_sparse_attention._interface",
    attribute="_bsa_attn_fwd_sm90_fp8_blk128",
    install="pip install nvidia-cudnn-frontend==1.32.0 'nvidia-cutlass-dsl>=4.6.2'",
)


@dataclass(frozen=True)
class SparseKernel(Implementation):
    """fp8: takes q, k and v as `Quantized`, laid out by heads in whole blocks, and its output goes through `finish`.
    any_block: takes blocks of any length; else 128."""

    fp8: bool = False
    any_block: bool = False


KERNELS: dict[str, SparseKernel] = {
    kernel.name: kernel
    for kernel in (
        SparseKernel("cudnn-fp8", "cuDNN frontend, FP8, blocks of 128", lambda: sparse_fp8,
                     Needs(HOPPER, 9, HALF, (128,)),
                     CUDNN_SPARSE_FP8.why_not, fp8=True),
        SparseKernel("cudnn", "cuDNN frontend, bf16, blocks of 128", lambda: sparse_bf16,
                     Needs(HOPPER, 12, HALF, (64, 128)), CUDNN_SPARSE.why_not),
        SparseKernel("flex", "torch's FlexAttention, blocks of 128", lambda: sparse_flex,
                     Needs(AMPERE, dtypes=HALF, head_dims=(16, 32, 64, 128)), fused.missing_triton),
        SparseKernel("math", "the formula, blocks of any length: for tests and small videos",
                     lambda: sparse_reference, any_block=True),
    )
}  # fmt: skip


def resolve_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int, *, fp8: bool
) -> SparseKernel:
    """The kernel called `name`. `auto`: FP8 where attention is FP8 anyway, else the fastest that runs.

    fp8: the dense backend takes FP8. Raises AttentionError for one that is not known or cannot run.
    """
    if name == "auto":
        names = () if tokens < SMALL else card_of(capability(device)).sparse
        fits = (k for k in map(KERNELS.__getitem__, names) if not k.fp8 or fp8)
        chosen = next((k for k in fits if k.why_not(device, dtype, head_dim) is None), KERNELS["math"])
        if names and chosen.name == "math":
            _say_slow(device, KERNELS["flex"].why_not(device, dtype, head_dim))
        return chosen
    if name not in KERNELS:
        raise AttentionError(f"sparse kernel {name!r} is not known; use one of: auto, {', '.join(KERNELS)}")
    kernel = KERNELS[name]
    reason = kernel.why_not(device, dtype, head_dim)
    if reason is None and kernel.fp8 and not fp8:
        reason = "attention is not FP8: choose an FP8 backend (cudnn-fp8), or the sparse kernel cudnn"
    if reason is not None:
        raise AttentionError(f"sparse kernel {name!r} cannot run on {device}: {reason}")
    return kernel


@functools.cache
def _say_slow(device: torch.device, reason: str | None) -> None:
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


# --------------------------------------------------------------------------------------- the functions behind the names


def sparse_bf16(q: Tensor, k: Tensor, v: Tensor, route: Route, block: int) -> tuple[Tensor, Tensor]:
    """q, k, v [B, L, H, D] -> [B, L, H, D] and log-sum-exp float32 [B, H, L]."""
    from cudnn.block_sparse_attention import (  # pyright: ignore[reportMissingImports]
        block_sparse_attention_forward,
    )

    counts = None
    if (capability(q.device) or (0, 0)) >= BLACKWELL:
        # Blackwell's kernel wants an even number where it is the same for all rows.
        counts = torch.full(route.blocks.shape[:-1], route.blocks.shape[-1], dtype=torch.int32, device=q.device)
    # Rows must begin at multiples of 16 bytes, which a view into a fused projection's output need not.
    q, k, v = (t if _aligned(t) else t.contiguous() for t in (q, k, v))
    outputs = block_sparse_attention_forward(
        q, k, v, route.blocks.contiguous(), q2k_block_nums=counts, sparse_block_size=block, layout="bshd"
    )
    return outputs["o_tensor"], outputs["lse_tensor"]


def sparse_fp8(q: Blocked, k: Blocked, v: Blocked, route: Route, block: int) -> tuple[Tensor, Tensor]:
    """q and k with memory [B, H, S, D], v with memory [B, H, D, S], one scale each, zeros after the tokens.

    -> bf16, a view [B, L, H, D], and log-sum-exp float32 [B, H, S], in both of which the keys of zeros count."""
    from cudnn.block_sparse_attention import _interface  # pyright: ignore[reportMissingImports]

    batch, heads, size, dim = q.memory.shape
    out, lse = _interface._bsa_attn_fwd_sm90_fp8_blk128(
        q.memory,
        k.memory,
        v.memory,
        q.scale.expand(batch * heads * size).reshape(batch, heads, size).contiguous(),
        k.scale.expand(batch * heads * size // 16).reshape(batch, heads, size // 16).contiguous(),
        v.scale.expand(heads * dim).reshape(heads, dim).contiguous(),
        route.blocks.contiguous(),
        route.blocks.shape[-1],
        dim**-0.5,
    )
    return out[:, :, : q.tokens].transpose(1, 2), lse


def _aligned(x: Tensor) -> bool:
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for n, stride in outer if n > 1)


VARIANTS = 64  # lengths of queries and of keys in one process


def sparse_flex(q: Tensor, k: Tensor, v: Tensor, route: Route, block: int) -> tuple[Tensor, Tensor]:
    """q, k, v [B, L, H, D] -> [B, L, H, D] and log-sum-exp float32 [B, H, L]."""
    heads = (t.transpose(1, 2) for t in (q, k, v))
    outputs = _flex(q.device.type)(*heads, block_mask=block_mask(route, q.shape[1], k.shape[1], block), **_wanted())
    out, more = outputs
    return out.transpose(1, 2).contiguous(), more if isinstance(more, Tensor) else more.lse


def block_mask(route: Route, queries: int, keys: int, block: int) -> Any:
    """`route` as FlexAttention reads it: blocks that are whole, and a last one that is not, to be masked inside.

    Inside a whole block it looks at nothing: there, keys behind the last one would count as zeros.
    """
    from torch.nn.attention.flex_attention import BlockMask

    blocks = route.blocks
    counts = torch.full(blocks.shape[:-1], blocks.shape[-1], dtype=torch.int32, device=blocks.device)
    width = -(-keys // block)
    parts, part = torch.zeros_like(counts), torch.zeros_like(counts)
    if keys % block:
        blocks, parts = without_last(blocks, width - 1)
        counts = counts - parts
        part = torch.full_like(counts, width - 1)
    selected = route.kept(width)
    compiled = blocks.is_cuda

    def inside(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        # What is not compiled asks for every pair, what is compiled only in the last block.
        return column < keys if compiled else selected[b, h, row // block, column // block]

    return BlockMask(
        seq_lengths=(queries, keys),
        kv_num_blocks=parts.contiguous(),
        kv_indices=F.pad(part[..., None], (0, width - 1)).contiguous(),
        full_kv_num_blocks=counts.contiguous(),
        full_kv_indices=F.pad(blocks, (0, width - blocks.shape[-1])).contiguous(),
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(block, block),
        mask_mod=inside,
    )


def without_last(blocks: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Rows of blocks int32 [..., K] with block `last` taken out, and int32 [...], 1 where it was there: then one block
    less of the row counts."""
    there = blocks == last
    return torch.where(there, blocks[..., -1:], blocks), there.any(-1).int()


@functools.cache
def _flex(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cuda":
        allow_variants(VARIANTS)  # uncompiled it reads more than the route says
    # Sizes are fixed when it is compiled: a few lengths of video are seen, and kernels for any length are slower.
    return full_disk_explained()(torch.compile(flex_attention, dynamic=False)) if device == "cuda" else flex_attention


@functools.cache
def _wanted() -> dict[str, Any]:
    """How this torch is asked for the log-sum-exp."""
    import inspect

    from torch.nn.attention import flex_attention

    parameters = inspect.signature(flex_attention.flex_attention).parameters
    if "return_aux" in parameters:
        return {"return_aux": flex_attention.AuxRequest(lse=True)}
    return {"return_lse": True}


SCORES = 1 << 26  # of queries and keys that are held at once, 256 MiB, in whole blocks of queries


def sparse_reference(q: Tensor, k: Tensor, v: Tensor, route: Route, block: int) -> tuple[Tensor, Tensor]:
    """q, k, v [B, L, H, D] -> attention over the blocks of keys that `route` names, [B, L, H, D] in q's dtype, and its
    log-sum-exp, float32 [B, H, L]."""
    B, L, H, D = q.shape
    selected = route.kept(-(-k.shape[1] // block))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(B, H, L, device=q.device)
    rows = max(1, SCORES // (B * k.shape[1] * block)) * block
    for head in range(H):
        keys, values = k[:, :, head].float(), v[:, :, head].float()
        for start in range(0, L, rows):
            some = slice(start, start + rows)
            mask = selected[:, head, start // block : (start + rows) // block]
            scores = (q[:, some, head].float() @ keys.mT) * D**-0.5  # [B, rows, S]
            scores.masked_fill_(~spread(mask, block, scores.shape[1], k.shape[1]), float("-inf"))
            lse[:, head, some] = scores.logsumexp(-1)
            out[:, some, head] = (scores.softmax(-1) @ values).type_as(q)
    return out, lse


def spread(kept: Tensor, block: int, queries: int, keys: int) -> Tensor:
    """bool [..., n, n] of blocks -> [..., queries, keys] of tokens."""
    return kept.repeat_interleave(block, -2)[..., :queries, :].repeat_interleave(block, -1)[..., :keys]
