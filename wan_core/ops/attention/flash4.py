"""FlashAttention 4 (flash-attn-4, written in the CuTe DSL): kernels for Hopper and Blackwell.

Its kernels compile on their first call for a head dim (seconds), or come from a folder where an earlier process kept
them (`config.compile_cache`), and take any length after that. They are wrapped as torch operators so that
torch.compile sees one opaque node with a known shape instead of breaking its graph there.

Legend and layouts as in sdpa.py. Source: github.com/Dao-AILab/flash-attention, flash_attn/cute/interface.py.
"""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor

from wan_core.ops.custom_ops import operator, shapes_of

log = logging.getLogger(__name__)


def _run(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(q.device), warnings.catch_warnings():  # it compiles for the current device and its stream
        # It warns of an argument of its own when it compiles; nothing that a user could change.
        warnings.filterwarnings("ignore", message="Argument aux_data")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        try:
            return flash_attn_func(q, k, v, return_lse=return_lse)
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:
            if not _forget_files():
                raise
            log.warning("a kernel that flash-attn-4 kept does not run (%s); it compiles anew in this process", fault)
            return flash_attn_func(q, k, v, return_lse=return_lse)


def _forget_files() -> bool:
    """Have the library compile, whatever it kept; False where it does already."""
    from flash_attn.cute import cache_utils, interface  # pyright: ignore[reportMissingImports]

    kernels = interface._flash_attn_fwd
    if not isinstance(kernels.compile_cache, cache_utils.JITPersistentCache):
        return False
    kernels.compile_cache = cache_utils.JITCache()
    return True


@operator("flash4", device_type="cuda")
def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _run(q, k, v, False)[0]


@operator("flash4_lse", device_type="cuda")
def flash4_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _run(q, k, v, True)


@shapes_of(flash4)
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@shapes_of(flash4_lse)
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=torch.float32)
