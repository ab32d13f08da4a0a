"""The fused operations of a transformer block: Triton on an NVIDIA GPU in half precision, plain torch everywhere else.

Legend: B batch, L tokens, C channels, H heads, D head dim, F modulation rows per sample.

Between matmuls, a block's time is memory traffic. Each function but `head_norm_fp8` is one pass: it reads every input
once and writes every output once, even if the output is FP8 for the next matmul (`fmt`, see `formats`). "May overwrite
x" means that the result may use the memory of x, so the caller must not use x again.
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

from wan_core.ops.cards import AMPERE, capability, has_fp8
from wan_core.ops.kernels import reference
from wan_core.ops.kernels.block_layout import Blocked, heads_first
from wan_core.ops.kernels.formats import BLOCK, FP8, FP8_MAX, Format, Quantized, quantize_reference
from wan_core.ops.library import Library, probe

log = logging.getLogger(__name__)
K_MEAN_EVERY = 32  # the mean that is subtracted from the keys is taken over every 32nd token
TRITON = Library(
    "Triton",
    "triton.errors",
    "TritonError",
    "on Windows `pip install -U triton-windows`, elsewhere `pip install triton`, in the version that fits this torch",
)
# Measured on an H200 at 480p and 720p, bf16; FP8 was not.
WITHOUT = "plain torch computes instead: 6 to 10 % more time in bf16, and twice the memory for activations"
MAX_ROW = 16384  # longest row in numbers: a row is held in registers
Agree = Callable[[Tensor, str], Tensor]
"""Reduces a float32 tensor over the ranks that hold shards: `agree(x, "mean")` or `agree(x, "max")`, equal on all."""


class _Choice:
    kernels: Literal["triton", "torch"] = "triton"
    devices: ClassVar[dict[torch.device, str | None]] = {}  # per device: why Triton cannot run, None if it can
    fp8: ClassVar[dict[torch.device, bool]] = {}  # per device: whether Triton kernels can write FP8


@contextmanager
def use(kernels: Literal["triton", "torch"]) -> Iterator[None]:
    """Use Triton kernels where they can run (the default) or plain torch, for benchmarks and tests."""
    before, _Choice.kernels = _Choice.kernels, kernels
    try:
        yield
    finally:
        _Choice.kernels = before


def why_not(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`; None if they can. Otherwise plain torch computes the same results."""
    if device not in _Choice.devices:
        prepare(device)
    return _Choice.devices[device]


def prepare(device: torch.device) -> None:
    """Test whether kernels run on `device`. Call it before torch.compile, which cannot trace the test."""
    reason = _test_kernels(device)
    _Choice.fp8[device] = reason is None and has_fp8(device)  # first: other threads ask for it if they find the next
    _Choice.devices[device] = reason
    if reason is not None and device.type == "cuda":
        log.warning("fused kernels: %s. %s", reason, WITHOUT)


def _test_kernels(device: torch.device) -> str | None:
    if (card := capability(device)) is None:
        return "needs an NVIDIA GPU"
    if card < AMPERE:
        return "needs compute capability 8.0 (Ampere) or newer"
    if (reason := missing_triton()) is not None:
        return reason
    from triton.errors import TritonError  # pyright: ignore[reportMissingImports]

    from wan_core.ops.kernels import triton_ops

    try:  # it builds a launcher with a C compiler when the first kernel runs
        x = torch.zeros(1, 1, 64, device=device, dtype=torch.bfloat16)
        triton_ops.residual(x, x.clone(), None)
    except (OSError, RuntimeError, SubprocessError, TritonError) as fault:
        return f"Triton cannot compile ({(str(fault).splitlines() or [type(fault).__name__])[0]}): install a C compiler"
    return None


def missing_triton() -> str | None:
    """Why Triton cannot be imported, and how to get it; None if it can."""
    return probe(TRITON)


def runs_kernel(x: Tensor, fmt: Format | None = None) -> bool:
    """Whether a kernel takes x [..., C] and writes `fmt`. Then `residual` and `residual_norm` overwrite x."""
    half = x.dtype in (torch.bfloat16, torch.float16)  # the latter in ComfyUI's own models
    if _Choice.kernels != "triton" or not half or not x.is_cuda or not 32 <= x.shape[-1] <= MAX_ROW:
        return False
    if x.device not in _Choice.devices:
        prepare(x.device)
    if fmt is not None and not _Choice.fp8[x.device]:
        return False
    return _Choice.devices[x.device] is None and (fmt != "block" or x.shape[-1] >= 2 * BLOCK)


def writes_fp8(x: Tensor) -> bool:
    """Whether a kernel takes rows of x [N, C], of any dtype, and writes FP8."""
    return x.is_cuda and triton_runs(x.device) and _Choice.fp8[x.device] and 32 <= x.shape[-1] <= MAX_ROW


def triton_runs(device: torch.device) -> bool:
    """Whether kernels are enabled and run on `device`, for kernels in other modules."""
    return _Choice.kernels == "triton" and why_not(device) is None


def norm(x: Tensor, mul: Tensor, add: Tensor, eps: float, fmt: Format | None = None) -> Tensor | Quantized:
    """LayerNorm without affine, then * mul + add: x [B, L, C], float32 mul and add [1 or B, F, C] -> [B, L, C] in x's
    dtype, or quantised."""
    if fmt != "tensor" and runs_kernel(x, fmt):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.norm(x, mul, add, eps, fmt)
    return _formatted(reference.scaled_norm(x, mul, add, eps), x.dtype, fmt)


def residual_norm(
    x: Tensor, update: Tensor, gate: Tensor | None, mul: Tensor, add: Tensor, eps: float, fmt: Format | None = None
) -> tuple[Tensor, Tensor | Quantized]:
    """(x + update * gate, its `norm`). May overwrite x. gate: float32 [B, F, C], or None for 1."""
    if fmt != "tensor" and runs_kernel(x, fmt):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.residual_norm(x, update, gate, mul, add, eps, fmt)
    total = reference.residual(x, update, gate)
    return total, _formatted(reference.scaled_norm(total, mul, add, eps), x.dtype, fmt)


def residual(x: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    """x + update * gate. May overwrite x."""
    if runs_kernel(x):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.residual(x, update, gate)
    return reference.residual(x, update, gate)


def head_norm(x: Tensor, weight: Tensor, heads: int, eps: float, rope: Tensor | None = None) -> Tensor:
    """RMSNorm over all heads together, then rotation of every head by `rope` [L, 1, D/2, 2] if given. May overwrite x.

    x [B, L, C] -> [B, L, H, D].
    """
    if runs_kernel(x) and _splits(x, heads):
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
    """`hadamard_fp8` of `head_norm` with one scale that follows from the norm's weight: queries and keys of FP8
    attention. May overwrite x.

    centre: subtract the mean over tokens. Subtracting a constant vector from all keys does not change the softmax, and
    it saves the bits of FP8 that the mean would use. The mean of every 32nd token is good enough. agree: averages the
    mean over the ranks if x is a shard of the tokens. block: as in `hadamard_fp8`.
    """
    normed, mean = head_norm(x, weight, heads, eps, rope), None
    if centre:
        mean = normed[:, ::K_MEAN_EVERY].float().mean((0, 1), keepdim=True)  # [1, 1, H, D]
        mean = mean if agree is None else agree(mean, "mean")
    return hadamard_fp8(normed, reference.bound_scale(weight, 2.0 if centre else 1.0), mean, block)


def hadamard_fp8(x: Tensor, scale: Tensor, mean: Tensor | None = None, block: int = 0) -> Quantized | Blocked:
    """x [B, L, H, D], any strides with D contiguous, less `mean` [1 or B, 1, H, D] if given, every head times a
    Hadamard matrix (`reference.hadamard_heads`), in FP8 with `scale` [1].

    block: write the layout of block-sparse attention with this block length (see `blocked`); 0: [B, L, H, D].
    """
    if _mixes(x):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.hadamard_fp8(x, scale, mean, block)
    centred = x.float() if mean is None else x.float() - mean.float()
    scaled = (reference.hadamard_heads(centred).float() / scale).clamp(-FP8_MAX, FP8_MAX)
    quantized = Quantized(scaled.to(FP8), scale)
    return heads_first(quantized, block) if block else quantized


def gelu(x: Tensor, fmt: Format | None = None) -> Tensor | Quantized:
    """GELU (tanh approximation) of x [..., C], in x's dtype or quantised. May overwrite x."""
    if fmt != "tensor" and runs_kernel(x, fmt):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.gelu(x, fmt)
    return _formatted(F.gelu(x, approximate="tanh"), x.dtype, fmt)


def quantize(x: Tensor, fmt: Format, agree: Agree | None = None) -> Quantized:
    """x [..., C] in FP8, scaled by its largest values. agree: one scale for all ranks if x is a shard ("tensor")."""
    assert agree is None or fmt == "tensor"
    amax = None if agree is None else agree(torch.linalg.vector_norm(x, float("inf")).float().reshape(1), "max")
    if runs_kernel(x, fmt):
        from wan_core.ops.kernels import triton_ops

        return triton_ops.quantize(x, fmt, amax)
    return quantize_reference(x, fmt, amax)


def _splits(x: Tensor, heads: int) -> bool:
    """Whether the head dim is a power of two, as the kernels require."""
    head = x.shape[-1] // heads
    return head & (head - 1) == 0


def _mixes(x: Tensor) -> bool:
    """Whether a kernel writes `hadamard_fp8` of x."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or not triton_runs(x.device):
        return False
    return _Choice.fp8[x.device] and 16 <= x.shape[-1] <= 256 and reference.has_hadamard(x.shape[-1])


def _formatted(x: Tensor, dtype: torch.dtype, fmt: Format | None) -> Tensor | Quantized:
    return x.to(dtype) if fmt is None else quantize(x, fmt)
