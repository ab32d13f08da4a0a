"""Dense attention by kernels of optional libraries.

FlashAttention: version 4 (flash-attn-4, kernels in the CuTe DSL for Hopper and Blackwell), 3 (flash_attn_interface,
compiled from the `hopper` folder of its repository, Hopper only) and 2 (flash-attn, Ampere and newer). torch carries
the algorithm of 2 as well; this is the library's own build. Version 4 compiles a kernel on its first call for a head
dim (seconds), or reads it from a folder where an earlier process kept it. It takes any length after that.
Source: github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py and
flash_attn/cute/interface.py.

INT8 changes numbers, and is taken only by name or by `fast`. SageAttention: q and k in int8 with a scale for each
block, K's mean removed. comfy-kitchen: q and k rotated by a Hadamard matrix, then q, k, v and the probabilities in
int8. Source: github.com/thu-ml/SageAttention, sageattention/core.py, and github.com/Comfy-Org/comfy-kitchen,
comfy_kitchen/sage_attention.py.

Legend and layouts as in sdpa.py.
"""

from __future__ import annotations

import inspect
import logging
import warnings

import torch
from torch import Tensor

from wan_core.ops.custom_ops import refuse_gradients
from wan_core.ops.library import Library

log = logging.getLogger(__name__)


def _run_flash4(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
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
    return _run_flash4(q, k, v, False)[0]


def flash4_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _run_flash4(q, k, v, True)


def flash2(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    # `return_attn_probs` brings the log-sum-exp; without dropout no matrix of probabilities is made.
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    # Some versions round the rows of lse up; out follows the strides of q.
    return out.contiguous(), lse[..., : q.shape[1]].contiguous()


def flash3(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    # Versions before the option always returned both.
    optional = "return_attn_probs" in inspect.signature(flash_attn_func).parameters
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True) if optional else flash_attn_func(q, k, v)
    return out.contiguous(), lse  # out follows the strides of q


def sage(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    refuse_gradients("SageAttention", q, k, v)
    from sageattention import sageattn  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(q.device):  # Triton launches on the current device
        return sageattn(q, k, v, tensor_layout="NHD", is_causal=False).contiguous()


KITCHEN = Library("comfy-kitchen", "comfy_kitchen", "int8_attention", "pip install 'comfy-kitchen>=0.2.31'")


def int8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    refuse_gradients("INT8 attention", q, k, v)
    import comfy_kitchen  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(q.device):
        # [B, L, H, D] -> [B, H, L, D], which it reads in any strides with D contiguous
        out = comfy_kitchen.int8_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2)


def why_not_kitchen() -> str | None:
    """None where its compiled kernel is there for the current GPU."""
    reason = KITCHEN.why_not()
    if reason is not None:
        return reason
    import comfy_kitchen  # pyright: ignore[reportMissingImports]

    if not comfy_kitchen.int8_attention_is_available():
        return f"comfy-kitchen is installed without its compiled kernels for this GPU: {KITCHEN.install}"
    return None
