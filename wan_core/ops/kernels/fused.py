"""The fused operations of a transformer block: Triton on an NVIDIA GPU in bf16, plain torch everywhere else.

Legend: B batch, L tokens, C channels, H heads, D head dim, F modulation rows per sample.

A block is memory traffic between matrix products. Each function here is one pass over it: it reads every input once and
writes every output once, also where the output is FP8 for the next product (`fmt`, see `formats`). Functions marked
"takes over" may write their result into the memory of that argument, which the caller must not use again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import SubprocessError
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.kernels import reference
from wan_core.ops.kernels.block_layout import Blocked, heads_first
from wan_core.ops.kernels.formats import BLOCK, Format, Quantized, quantize_reference

log = logging.getLogger(__name__)
K_MEAN_EVERY = 32  # tokens between those whose mean is taken off the keys
MAX_ROW = 16384  # a row is held in registers
Agree = Callable[[Tensor, str], Tensor]
"""A float32 tensor of each shard -> their "mean" or "max", the same on all."""


class _Choice:
    kernels: Literal["triton", "torch"] = "triton"
    devices: ClassVar[dict[torch.device, str | None]] = {}  # why Triton does not run there, found out once
    fp8: ClassVar[dict[torch.device, bool]] = {}  # whether it can make FP8 there


@contextmanager
def use(kernels: Literal["triton", "torch"]) -> Iterator[None]:
    """Run with Triton kernels where they can (the normal state) or with plain torch: for measuring and testing."""
    before, _Choice.kernels = _Choice.kernels, kernels
    try:
        yield
    finally:
        _Choice.kernels = before


def why_not(device: torch.device) -> str | None:
    """Why the kernels do not run on `device`; None where they do. Plain torch runs instead, to the same numbers."""
    if device not in _Choice.devices:
        prepare(device)
    return _Choice.devices[device]


def prepare(device: torch.device) -> None:
    """Find out whether kernels run on `device`: before anything is compiled, because a compiler cannot ask."""
    _Choice.devices[device] = reason = _find_out(device)
    _Choice.fp8[device] = reason is None and torch.cuda.get_device_capability(device) >= (8, 9)
    if reason is not None and device.type == "cuda":
        log.warning("fused kernels: %s; plain torch runs in their place, slower", reason)


def _find_out(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or newer"
    try:
        from triton.errors import TritonError  # pyright: ignore[reportMissingImports]

        from wan_core.ops.kernels import triton_ops
    except (ImportError, OSError, RuntimeError, AttributeError) as fault:
        return f"Triton cannot be imported ({fault})"
    try:  # it builds a launcher with a C compiler when the first kernel runs
        x = torch.zeros(1, 1, 64, device=device, dtype=torch.bfloat16)
        triton_ops.residual(x, x.clone(), None)
    except (OSError, RuntimeError, SubprocessError, TritonError) as fault:
        return (
            f"Triton cannot compile ({(str(fault).splitlines() or [type(fault).__name__])[0]}): is there a C compiler?"
        )
    return None


def _fast(x: Tensor, fmt: Format | None = None) -> bool:
    """Whether x [..., C] goes to a kernel, which then makes `fmt` of it."""
    if _Choice.kernels != "triton" or x.dtype != torch.bfloat16 or not x.is_cuda or not 32 <= x.shape[-1] <= MAX_ROW:
        return False
    if x.device not in _Choice.devices:
        prepare(x.device)
    if fmt is not None and not _Choice.fp8[x.device]:
        return False
    return _Choice.devices[x.device] is None and (fmt != "block" or x.shape[-1] >= 2 * BLOCK)


def uses_kernels() -> bool:
    """Whether kernels are not turned off."""
    return _Choice.kernels == "triton"


def runs_kernel(x: Tensor, fmt: Format | None = None) -> bool:
    """Whether a kernel takes x [..., C] and makes `fmt` of it, for passes that stand elsewhere."""
    return _fast(x, fmt)


def triton_runs(device: torch.device) -> bool:
    """Whether kernels of this package run on `device` now, for operations of other files."""
    if device not in _Choice.devices:
        prepare(device)
    return _Choice.kernels == "triton" and _Choice.devices[device] is None


def overwrites(x: Tensor) -> bool:
    """Whether `residual` and `residual_norm` write their result into x, and not beside it."""
    return _fast(x)


def norm(x: Tensor, mul: Tensor, add: Tensor, eps: float, fmt: Format | None = None) -> Tensor | Quantized:
    """LayerNorm without affine, then * mul + add: x [B, L, C], float32 mul and add [1 or B, F, C] -> [B, L, C] in x's
    dtype, or quantised."""
    if fmt != "tensor" and _fast(x, fmt):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.norm(x, mul, add, eps, fmt)
    return _formatted(reference.scaled_norm(x, mul, add, eps), x.dtype, fmt)


def residual_norm(
    x: Tensor, update: Tensor, gate: Tensor | None, mul: Tensor, add: Tensor, eps: float, fmt: Format | None = None
) -> tuple[Tensor, Tensor | Quantized]:
    """(x + update * gate, its `norm`). Takes over x. gate: float32 [B, F, C], or None for 1."""
    if fmt != "tensor" and _fast(x, fmt):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.residual_norm(x, update, gate, mul, add, eps, fmt)
    total = reference.residual(x, update, gate)
    return total, _formatted(reference.scaled_norm(total, mul, add, eps), x.dtype, fmt)


def residual(x: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    """x + update * gate. Takes over x."""
    if _fast(x):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.residual(x, update, gate)
    return reference.residual(x, update, gate)


def head_norm(x: Tensor, weight: Tensor, heads: int, eps: float, rope: Tensor | None = None) -> Tensor:
    """RMSNorm over all heads at once, then the rotation of every head by `rope` [L, 1, D/2, 2] if given. Takes over x.

    x [B, L, C] -> [B, L, H, D].
    """
    if _fast(x) and _splits(x, heads):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.head_norm(x, weight, eps, rope, heads)
    normed = reference.rms_norm(x, weight, eps).unflatten(-1, (heads, -1))
    return normed if rope is None else reference.rotate(normed, rope)


def head_norm_fp8(
    x: Tensor,
    weight: Tensor,
    heads: int,
    eps: float,
    rope: Tensor,
    *,
    centre: bool = False,
    block: int = 0,
    agree: Agree | None = None,
) -> Quantized | Blocked:
    """`head_norm` in FP8 with one scale, known beforehand from the norm's weight: queries and keys of FP8 attention.

    centre: take off a mean over tokens. Under softmax any constant vector may be taken off the keys, and their mean is
    what FP8 would waste its bits on; that of every 32nd token does as well as the whole. agree: where x is a shard of
    the tokens, makes it one mean for all of them.
    block: lay the result out for block-sparse attention, see `blocked`; 0: as it comes.
    """
    mean = None
    if centre:
        few = x[:, ::K_MEAN_EVERY]
        mean = head_norm(few.clone(), weight, heads, eps, rope[::K_MEAN_EVERY]).float().mean((0, 1)).flatten()  # [C]
        mean = mean if agree is None else agree(mean, "mean")
    if _fast(x, "tensor") and _splits(x, heads):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.head_norm_fp8(x, weight, eps, rope, heads, mean, block)
    turned = reference.rotate(reference.rms_norm(x, weight, eps).unflatten(-1, (heads, -1)), rope).float()
    if mean is not None:
        turned = turned - mean.unflatten(0, (heads, -1))
    found = reference.to_scale(turned, reference.bound_scale(weight, 2.0 if centre else 1.0))
    if not block:
        return found
    return heads_first(found, block)


def gelu(x: Tensor, fmt: Format | None = None) -> Tensor | Quantized:
    """GELU (tanh form) of x [..., C], in x's dtype or quantised. Takes over x."""
    if fmt != "tensor" and _fast(x, fmt):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.gelu(x, fmt)
    return _formatted(F.gelu(x, approximate="tanh"), x.dtype, fmt)


def quantize(x: Tensor, fmt: Format, agree: Agree | None = None) -> Quantized:
    """x [..., C] in FP8 with scales of its own. agree: where x is a shard of the "tensor", makes one scale for all."""
    assert agree is None or fmt == "tensor"
    amax = None if agree is None else agree(torch.linalg.vector_norm(x, float("inf")).float().reshape(1), "max")
    if _fast(x, fmt):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.quantize(x, fmt, amax)
    return quantize_reference(x, fmt, amax)


def _splits(x: Tensor, heads: int) -> bool:
    """Whether heads are as long as a kernel wants them: a power of two."""
    head = x.shape[-1] // heads
    return head & (head - 1) == 0


def _formatted(x: Tensor, dtype: torch.dtype, fmt: Format | None) -> Tensor | Quantized:
    return x.to(dtype) if fmt is None else quantize(x, fmt)
