"""The ways to hold and multiply a transformer's linears, by the name a user gives as precision, and where each runs.

A name resolves once, when a model is set up; nothing falls back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from wan_core.config import QUANTIZED, OptionError
from wan_core.ops.cards import ADA, FP8_SINCE, capability
from wan_core.ops.quant import fp8, int8
from wan_core.ops.quant import transformer_engine as te
from wan_core.ops.quant.linear import QuantLinear


@dataclass(frozen=True)
class Scheme:
    """`why_not` returns None where the scheme runs, else the reason and what to do."""

    name: str
    summary: str
    why_not: Callable[[torch.device], str | None]
    linear: type[QuantLinear]


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
        Scheme("fp8", "FP8 with a scale for every row", _rows_why_not, fp8.Fp8RowLinear),
        Scheme("fp8-tensor", "FP8 with one scale for a tensor", multiplies_fp8, fp8.Fp8TensorLinear),
        Scheme("fp8-weights", "FP8 in memory, bf16 products", lambda device: None, fp8.Fp8WeightLinear),
        Scheme("te-delayed", "Transformer Engine, scales from the amax history",
               partial(te.why_not, name="te-delayed"), te.TEDelayedLinear),
        Scheme("te-current", "Transformer Engine, one scale for a tensor",
               partial(te.why_not, name="te-current"), te.TECurrentLinear),
        Scheme("te-block", "Transformer Engine, scales for blocks of 128",
               partial(te.why_not, name="te-block"), te.TEBlockLinear),
        Scheme("int8", "INT8 rows, rotated (ConvRot)", int8.why_not_multiply, int8.Int8Linear),
    )
}  # fmt: skip
assert tuple(SCHEMES) == QUANTIZED


def resolve_scheme(precision: str, device: torch.device) -> Scheme | None:
    """The scheme of `precision` on `device`; None for a precision that quantises nothing.

    Raises OptionError for a scheme that cannot run here, saying why and what can.
    """
    scheme = SCHEMES.get(precision)
    reason = None if scheme is None else scheme.why_not(device)
    if reason is not None:
        able = ", ".join(name for name, one in SCHEMES.items() if one.why_not(device) is None)
        raise OptionError(
            f"precision {precision!r} cannot run on {device}: {reason}. Use checkpoint, or one that runs here: {able}"
        )
    return scheme
