"""FP8 linears on Transformer Engine's kernels: its three recipes without its modules.

Legend: M rows of activations, K inputs, N outputs. "amax" is the largest magnitude in a tensor.

All are E4M3. Weights and scales are stored as by the native linears in `fp8`; on a CPU these classes compute what those
do. The custom ops take and return plain tensors, so nothing but the FP8 weight is kept. Everything that depends on the
library's Python interface is in `Engine`. Block scales are full float32 numbers, not powers of two as is the recipe's
default: nothing is lost to a loose scale.

Source: github.com/NVIDIA/TransformerEngine, transformer_engine/pytorch (tensor, cpp_extensions/gemm.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wan_core.ops.cards import FP8_SINCE, HOPPER, capability, cuda_version
from wan_core.ops.custom_ops import operator
from wan_core.ops.kernels.formats import BLOCK, FP8, FP8_MAX, Quantized
from wan_core.ops.library import IMPORT_FAULTS, Library, load_torchs_cudnn
from wan_core.ops.quant.fp8 import Fp8BlockLinear, Fp8TensorLinear, padded, why_not_multiply

HISTORY = 16  # forwards of the model whose amax decides a delayed scale
_INFINITY = float("inf")
_INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
_LIBRARY = Library(
    "Transformer Engine",
    "transformer_engine.pytorch",
    "Float8CurrentScalingQuantizer",
    f"{_INSTALL} compiles it",
    before=load_torchs_cudnn,
)

# --------------------------------------------------------------------------------------------------------- requirements


def why_not(device: torch.device) -> str | None:
    """Why recipes with one scale for a tensor do not run on `device`, and what to do; None where they do. The first
    call on a fitting GPU imports the library, which takes seconds."""
    if capability(device) is None:
        return "Transformer Engine needs an NVIDIA GPU"
    return why_not_multiply(device) or missing()


def why_not_blocks(device: torch.device) -> str | None:
    """Why the recipe with scales for blocks does not run. Blackwell emulates it in MXFP8, with other weights: scales
    that are powers of two."""
    version = capability(device)
    if version is not None and version >= FP8_SINCE:
        if version[0] != HOPPER[0]:
            return "scales for blocks of 128 need Hopper (compute capability 9.0): use te-current"
        if cuda_version() < (12, 9):
            return f"scales for blocks need CUDA 12.9, and this torch has {torch.version.cuda}: use te-current"
    return why_not(device)


@functools.cache
def missing() -> str | None:
    """Why the library cannot be used from here, and what to install; None where it can."""
    reason = _LIBRARY.why_not()
    if reason is None:
        try:
            engine()
        except IMPORT_FAULTS as fault:
            return f"{fault}. Written for transformer-engine 2.20: {_INSTALL}"
    return reason


def require_arguments(function: Callable[..., Any], *names: str) -> None:
    """Raise RuntimeError if `function` of the library does not take arguments of these names."""
    lacking = [name for name in names if name not in inspect.signature(function).parameters]
    if lacking:
        owner = function.__qualname__.removesuffix(".__new__").removesuffix(".__init__")
        raise RuntimeError(f"this Transformer Engine differs: its {owner} takes no {', '.join(lacking)}")


# ---------------------------------------------------------------------------------------------------------- the library


class Engine:
    """Transformer Engine as this file uses it. Its quantised tensors are built around our memory, for one call."""

    def __init__(self) -> None:
        """Raises what a broken installation raises (IMPORT_FAULTS), and RuntimeError where the interface differs."""
        from transformer_engine.pytorch import (  # type: ignore
            DType,
            Float8BlockQuantizer,
            Float8BlockwiseQTensorStorage,
            Float8CurrentScalingQuantizer,
            Float8Quantizer,
            Float8TensorStorage,
        )
        from transformer_engine.pytorch.cpp_extensions import general_gemm  # type: ignore

        require_arguments(general_gemm, "out_dtype", "bias", "layout", "use_split_accumulator")
        require_arguments(Float8TensorStorage.__new__, "data", "fp8_scale_inv", "fp8_dtype")
        blocks = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "is_2D_scaled")
        require_arguments(Float8BlockwiseQTensorStorage.__new__, "fp8_dtype", "quantizer", *blocks)
        require_arguments(Float8Quantizer.__init__, "scale", "amax", "fp8_dtype", "rowwise", "columnwise")
        require_arguments(Float8CurrentScalingQuantizer.__init__, "fp8_dtype", "device", "rowwise", "columnwise")
        require_arguments(Float8BlockQuantizer.__init__, "force_pow_2_scales", "block_scaling_dim")
        self.general_gemm = general_gemm
        self.e4m3 = DType.kFloat8E4M3
        self.TensorStorage, self.BlockStorage = Float8TensorStorage, Float8BlockwiseQTensorStorage
        self.DelayedQuantizer = Float8Quantizer
        # columnwise: the transposed copy that training wants
        self.current = Float8CurrentScalingQuantizer(
            self.e4m3, device=torch.device("cuda"), rowwise=True, columnwise=False
        )
        self.block = Float8BlockQuantizer(
            self.e4m3, rowwise=True, columnwise=False, force_pow_2_scales=False, block_scaling_dim=1
        )
        self.current.internal = self.block.internal = True  # storage without a tensor subclass around it

    def quantize_delayed(self, x: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """With `scale` [1]; values beyond 448 saturate. The kernel raises `amax` [1] to x's."""
        quantizer = self.DelayedQuantizer(scale=scale, amax=amax, fp8_dtype=self.e4m3, rowwise=True, columnwise=False)
        quantizer.internal = True
        return _fields(quantizer.quantize(x), "data", "fp8_scale_inv")

    def tensor(self, data: Tensor, scale: Tensor) -> Any:
        return self.TensorStorage(data=data.view(torch.uint8), fp8_scale_inv=scale, fp8_dtype=self.e4m3)

    def blocks(self, data: Tensor, scale: Tensor, *, square: bool) -> Any:
        return self.BlockStorage(
            rowwise_data=data.view(torch.uint8), rowwise_scale_inv=scale, columnwise_data=None,
            columnwise_scale_inv=None, fp8_dtype=self.e4m3, quantizer=None, is_2D_scaled=square,
        )  # fmt: skip

    def multiply(
        self, data: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """data [M, K] @ weight [N, K] transposed + bias [N] -> [M, N] in `dtype`.

        scale [1] and weight_scale [1], or scale [M, K / 128] of any strides and weight_scale [N / 128, K / 128].
        """
        by_blocks, rows = weight_scale.ndim == 2, len(data)
        if by_blocks:  # the kernel wants rows in eights and rows of weight scales in fours
            scales = padded(scale.t(), 8, 1).contiguous()
            x = self.blocks(padded(data, 8, 0), scales, square=False)
            w = self.blocks(weight, padded(weight_scale, 4, 1), square=True)
        else:
            x, w = self.tensor(data, scale), self.tensor(weight, weight_scale)
        fused = None if dtype == torch.float32 else bias  # the kernel adds only what is of the output's dtype
        out = self.general_gemm(
            w, x, out_dtype=dtype, bias=fused, layout="TN", use_split_accumulator=by_blocks
        )[0][:rows]  # fmt: skip
        return out if fused is bias else out.add_(bias)


def _fields(quantized: Any, data: str, scale: str) -> tuple[Tensor, Tensor]:
    fields = quantized.get_metadata()
    return fields[data].view(FP8), fields[scale]


@functools.cache
def engine() -> Engine:
    return Engine()


# ------------------------------------------------------------------------------------------------------------------ ops


def _one_scale(x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(1, dtype=torch.float32)


def _block_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = -(-x.shape[-1] // BLOCK)
    lead = (x.numel() // x.shape[-1] + 3) // 4 * 4
    strides = [1]
    for size in reversed(x.shape[1:-1]):
        strides.insert(0, strides[0] * size)
    scales = torch.empty_strided((*x.shape[:-1], groups), (*strides, lead), dtype=torch.float32, device=x.device)
    return x.new_empty(x.shape, dtype=FP8), scales


@operator("te_quantize_current", _one_scale)
def _quantize_current(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.cuda.device(x.device):  # the library allocates and launches on the current device
        return _fields(engine().current.quantize(x), "data", "fp8_scale_inv")


@operator("te_quantize_block", _block_scales)
def _quantize_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [..., K / 128], those of a group together. The padding of the rows to a multiple of 4 that follows each
    group stays in here: a compiler that saw it would compile sizes without it apart."""
    with torch.cuda.device(x.device):
        data, scales = _fields(engine().block.quantize(x), "rowwise_data", "rowwise_scale_inv")
    rows = x.numel() // x.shape[-1]
    return data, scales.narrow(1, 0, rows).t().unflatten(0, x.shape[:-1])


@operator("te_quantize_delayed", _one_scale, mutates_args=("scale", "amax", "used"))
def _quantize_delayed(x: Tensor, scale: Tensor, amax: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The tensors of a `Slot`. The first use sets `scale` from x itself; any use raises `amax`."""
    if not used.item():  # in host memory: no wait for the device
        peak = torch.linalg.vector_norm(x, _INFINITY).float().reshape(1)  # reduces without a copy of |x|
        scale.copy_(scale_for(peak, torch.ones_like(peak)))  # nothing but zeros: any scale is right
        used.fill_(True)
    if not x.is_cuda:
        values = x.float()
        amax.copy_(torch.maximum(amax, values.abs().amax()))
        return (values * scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale.reciprocal()
    with torch.cuda.device(x.device):
        return engine().quantize_delayed(x, scale, amax)


@operator(
    "te_gemm", lambda data, scale, weight, *rest: data.new_empty((data.shape[0], weight.shape[0]), dtype=rest[-1])
)
def _gemm(
    data: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    # The library passes bare pointers on: what it is not told, it does not notice.
    if {scale.device, weight.device, weight_scale.device} != {data.device}:
        raise RuntimeError(
            f"input on {data.device} and weight on {weight.device}: move the model to the input's device"
        )
    if weight_scale.ndim == 2:
        scale = scale.flatten(0, -2)  # [M, K / 128]
    expected = (len(data), weight_scale.shape[1]) if weight_scale.ndim == 2 else (1,)
    if scale.shape != expected:
        raise ValueError(f"input with scales {tuple(scale.shape)} given; this recipe multiplies {tuple(expected)}")
    with torch.cuda.device(data.device):
        return engine().multiply(data, scale, weight, weight_scale, bias, dtype)


# -------------------------------------------------------------------------------------------------------------- linears


class TECurrentLinear(Fp8TensorLinear):
    """Float8CurrentScaling: one scale for all activations, from their own amax, and one for the weight."""

    def quantize(self, x: Tensor) -> Quantized:
        return Quantized(*_quantize_current(x)) if x.is_cuda else super().quantize(x)

    def multiply(self, data: Tensor, scale: Tensor) -> Tensor:
        return _gemm(data, scale, self.weight, self.weight_scale, self.bias, self.dtype)


class TEBlockLinear(Fp8BlockLinear):
    """Float8BlockScaling: a scale for every 128 inputs of a row of activations and every 128 x 128 weights."""

    def quantize(self, x: Tensor) -> Quantized:
        if not x.is_cuda:
            return super().quantize(x)
        return Quantized(*_quantize_block(x))

    def multiply(self, data: Tensor, scale: Tensor) -> Tensor:
        return _gemm(data, scale, self.weight, self.weight_scale, self.bias, self.dtype)


class TEDelayedLinear(TECurrentLinear):
    """DelayedScaling, history 16, max, margin 0: the scale of the activations comes from forwards before this one, so
    one pass quantises.

    It belongs to a `DelayedState`, which the model must have before its first forward. Inputs that share one
    quantisation (q, k, v) share the state of the linear whose `quantize` made it.
    """

    slot: Slot | None = None
    state: DelayedState | None = None

    def quantize(self, x: Tensor) -> Quantized:
        if self.slot is None:
            raise RuntimeError("delayed scaling without a state: call DelayedState.install(model, device) first")
        return Quantized(*_quantize_delayed(x, *self.slot))


# ------------------------------------------------------------------------------------------------------- delayed scales


class Slot(NamedTuple):
    """What one delayed linear reads and writes.

    Tensors of their own, not views of one: compiled blocks take them as inputs, and inputs that alias each other, start
    at odd addresses or differ in their offset from block to block cost guards, copies and recompilations. Not buffers
    of the module either: swapping and streaming a model's tensors would bring back old values.
    """

    scale: Tensor  # float32 [1]: numbers are multiplied by it and rounded
    amax: Tensor  # float32 [1]: the largest magnitude since the last update
    used: Tensor  # bool [1], in host memory: whether there was a first use


class DelayedState:
    """The amax history and the scales of all delayed linears of one model (one expert).

    A linear's first use takes its scale from its own input, so none ever runs with an arbitrary one. From then on the
    kernel that quantises also measures, and `update`, once after every forward of the model, turns the largest amax of
    the last 16 forwards into the next scale. The two branches of guidance are forwards of the same model: both enter
    the history, and neither overwrites the other. Numbers that outgrow the history saturate, for one forward.
    """

    def __init__(self, linears: Iterable[TEDelayedLinear], device: torch.device) -> None:
        """device: where the linears compute, which need not be where their weights rest."""
        linears = list(linears)
        with torch.inference_mode(False):  # updated in place later, in whatever mode
            self.slots = [
                Slot(torch.zeros(1, device=device), torch.zeros(1, device=device), torch.zeros(1, dtype=torch.bool))
                for _ in linears
            ]
            self.history = torch.zeros(HISTORY, len(linears), device=device)  # newest first
        for linear, slot in zip(linears, self.slots, strict=True):
            linear.slot, linear.state = slot, self

    @classmethod
    def install(cls, model: nn.Module, device: torch.device) -> DelayedState | None:
        """Give every delayed linear of `model` a state, which the caller updates after each forward. None, and nothing
        done, where there is no such linear, or all have one."""
        linears = [m for m in model.modules() if isinstance(m, TEDelayedLinear) and m.slot is None]
        if not linears:
            return None
        return cls(linears, device)

    @staticmethod
    def reset(model: nn.Module) -> None:
        """Forget what earlier videos were like: the next forward calibrates, and the same request gives the same video
        whatever came before it."""
        states = {m.state for m in model.modules() if isinstance(m, TEDelayedLinear) and m.state is not None}
        for state in states:
            state.history.zero_()
            for slot in state.slots:
                slot.amax.zero_()
                slot.used.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Move the amax since the last call into the history and set the scales: a few launches for all linears
        together, and no wait for the device."""
        scales, amaxes = [slot.scale for slot in self.slots], [slot.amax for slot in self.slots]
        history, scale = next_scales(self.history, torch.cat(amaxes), torch.cat(scales))
        self.history.copy_(history)
        torch._foreach_copy_(scales, list(scale.split(1)))  # type: ignore
        torch._foreach_zero_(amaxes)  # type: ignore


def next_scales(history: Tensor, amax: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(history, scales) after a forward that measured `amax` [n]: history [16, n], newest first, scale [n].

    A linear that was not used, saw only zeros, or met a number that is not finite keeps its history and its scale.
    """
    seen = (amax > 0) & amax.isfinite()
    history = torch.where(seen, torch.cat((amax[None], history[:-1])), history)
    return history, scale_for(history.amax(0), scale)


def scale_for(peak: Tensor, otherwise: Tensor) -> Tensor:
    """448 / peak, and `otherwise` where that is no number to multiply by."""
    fits = (peak > 0) & peak.isfinite()
    return torch.where(fits, (FP8_MAX / peak).clamp(max=torch.finfo(torch.float32).max), otherwise)
