"""The ways to hold and multiply a transformer's linears, by the name a user gives as precision, and where each runs.

A name resolves once, when a model is set up; nothing falls back afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wan_core.config import QUANTIZED, OptionError
from wan_core.config.command import command
from wan_core.ops.cards import ADA, FP8_SINCE, capability
from wan_core.ops.quant import int8
from wan_core.ops.quant.linear import QuantLinear


@dataclass(frozen=True)
class Scheme:
    """`why_not` returns None where the scheme runs, else the reason and what to do. `load` imports what it needs."""

    name: str
    summary: str
    why_not: Callable[[torch.device], str | None]
    load: Callable[[], type[QuantLinear]]


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"wan_core.ops.quant.{module}"), name)


def _native(name: str, summary: str, why_not: Callable[[torch.device], str | None], linear: str) -> Scheme:
    return Scheme(name, summary, why_not, lambda: _imported("fp8", linear))


def _engine(name: str, summary: str, linear: str) -> Scheme:
    """A scheme of Transformer Engine."""

    def why_not(device: torch.device) -> str | None:
        return _imported("transformer_engine", "why_not")(device, name)

    return Scheme(name, f"Transformer Engine, {summary}", why_not, lambda: _imported("transformer_engine", linear))


def multiplies_fp8(device: torch.device) -> str | None:
    """Why torch cannot multiply FP8 on `device`. A CPU can, by way of float32."""
    if device.type == "cpu":
        return None
    if (version := capability(device)) is None:
        return "needs an NVIDIA GPU"
    if version < FP8_SINCE:
        return (
            f"{torch.cuda.get_device_name(device)} has no FP8 units (they come with compute capability 8.9, Ada): use "
            "fp8-weights, which halves the memory and computes in bf16"
        )
    return None


def _rows_why_not(device: torch.device) -> str | None:
    if capability(device) == ADA and _cuda() < (12, 9):
        return "on Ada a scale for every row needs CUDA 12.9: use fp8-tensor"
    return multiplies_fp8(device)


def _cuda() -> tuple[int, ...]:
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")))


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _native("fp8", "FP8 with a scale for every row", _rows_why_not, "Fp8RowLinear"),
        _native("fp8-tensor", "FP8 with one scale for a tensor", multiplies_fp8, "Fp8TensorLinear"),
        _native("fp8-weights", "FP8 in memory, bf16 products", lambda device: None, "Fp8WeightLinear"),
        _engine("te-delayed", "scales from the amax history", "TEDelayedLinear"),
        _engine("te-current", "one scale for a tensor", "TECurrentLinear"),
        _engine("te-block", "scales for blocks of 128", "TEBlockLinear"),
        Scheme("int8", "INT8 rows, rotated (ConvRot)", int8.why_not_multiply, lambda: int8.Int8Linear),
    )
}
assert tuple(SCHEMES) == QUANTIZED


def resolve_scheme(precision: str, device: torch.device) -> Scheme | None:
    """The scheme of `precision` on `device`; None for a precision that quantises nothing.

    Raises OptionError for a scheme that cannot run here, saying why and what can.
    """
    scheme = SCHEMES.get(precision)
    reason = None if scheme is None else scheme.why_not(device)
    if reason is not None:
        raise OptionError(
            f"precision {precision!r} cannot run on {device}: {reason}. `{command('doctor')}` lists what can."
        )
    return scheme
