"""The ways to hold and multiply a transformer's linears, by the name a user gives as precision, and where each runs.

A name resolves once, when a model is set up; nothing falls back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from wan_core.config import QUANTIZED, OptionError
from wan_core.ops.cards import ADA, capability, cuda_version
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


def _rows_why_not(device: torch.device) -> str | None:
    if capability(device) == ADA and cuda_version() < (12, 9):
        return "on Ada a scale for every row needs CUDA 12.9: use fp8-tensor"
    return fp8.why_not_multiply(device)


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", "FP8 with a scale for every row", _rows_why_not, fp8.Fp8RowLinear),
        Scheme("fp8-tensor", "FP8 with one scale for a tensor", fp8.why_not_multiply, fp8.Fp8TensorLinear),
        Scheme("fp8-weights", "FP8 in memory, bf16 products", lambda device: None, fp8.Fp8WeightLinear),
        Scheme("te-delayed", "Transformer Engine, scales from the amax history", te.why_not, te.TEDelayedLinear),
        Scheme("te-current", "Transformer Engine, one scale for a tensor", te.why_not, te.TECurrentLinear),
        Scheme("te-block", "Transformer Engine, scales for blocks of 128", te.why_not_blocks, te.TEBlockLinear),
        Scheme("int8", "INT8 rows, rotated (ConvRot)", int8.why_not_multiply, int8.Int8Linear),
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
        able = ", ".join(name for name, one in SCHEMES.items() if one.why_not(device) is None)
        raise OptionError(
            f"precision {precision!r} cannot run on {device}: {reason}. Use checkpoint, or one that runs here: {able}"
        )
    return scheme
