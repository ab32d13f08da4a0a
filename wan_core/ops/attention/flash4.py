"""FlashAttention 4 (flash-attn-4, written in the CuTe DSL): kernels for Hopper and Blackwell.

Its kernels compile on their first call for a head dim (seconds), or come from a folder where an earlier process kept
them, and take any length after that.

Legend and layouts as in sdpa.py. Source: github.com/Dao-AILab/flash-attention, flash_attn/cute/interface.py.
"""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor

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
        except (RuntimeError, OSError) as fault:  # what loading or launching a kernel from a damaged file raises
            if not _forget_files():
                raise
            log.warning(
                "a kernel that flash-attn-4 kept does not run (%s); it is compiled again in this process", fault
            )
            return flash_attn_func(q, k, v, return_lse=return_lse)


def _forget_files() -> bool:
    """Make the library compile again instead of reading kept kernels; False where it already does."""
    from flash_attn.cute import cache_utils, interface  # pyright: ignore[reportMissingImports]

    kernels = interface._flash_attn_fwd
    if not isinstance(kernels.compile_cache, cache_utils.JITPersistentCache):
        return False
    kernels.compile_cache = cache_utils.JITCache()
    return True


def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _run(q, k, v, False)[0]


def flash4_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _run(q, k, v, True)
