"""The ways to hold and multiply a transformer's linears, by the name a user gives as precision, and where each runs.

A name resolves once, when a model is set up; nothing falls back afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from wan_core.config import QUANTIZED, OptionError
from wan_core.ops.quant.linear import QuantLinear

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scheme:
    """`why_not` returns None where the scheme runs, else the reason and what to do. `load` imports what it needs."""

    name: str
    summary: str
    why_not: Callable[[torch.device], str | None]
    load: Callable[[], type[QuantLinear]]


def _native(name: str) -> Callable[[], type[QuantLinear]]:
    def load() -> type[QuantLinear]:
        from wan_core.ops.quant import fp8

        return getattr(fp8, name)

    return load


def _engine(name: str) -> Callable[[], type[QuantLinear]]:
    def load() -> type[QuantLinear]:
        from wan_core.ops.quant import transformer_engine

        return getattr(transformer_engine, name)

    return load


def _engine_why_not(name: str) -> Callable[[torch.device], str | None]:
    def why_not(device: torch.device) -> str | None:
        from wan_core.ops.quant import transformer_engine

        return transformer_engine.why_not(device, name)

    return why_not


def multiplies_fp8(device: torch.device) -> str | None:
    """Why torch cannot multiply FP8 on `device`. A CPU can, by way of float32."""
    if device.type == "cpu":
        return None
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return (
            f"{torch.cuda.get_device_name(device)} has no FP8 units (they come with compute capability 8.9, Ada): use "
            "fp8-weights, which halves the memory and computes in bf16"
        )
    return None


def _rows_why_not(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (8, 9) and _cuda() < (12, 9):
        return "on Ada a scale for every row needs CUDA 12.9: use fp8-tensor"
    return multiplies_fp8(device)


def _cuda() -> tuple[int, ...]:
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")))


def _anywhere(device: torch.device) -> str | None:
    return None


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", "FP8 with a scale for every row", _rows_why_not, _native("Fp8RowLinear")),
        Scheme("fp8-tensor", "FP8 with one scale for a tensor", multiplies_fp8, _native("Fp8TensorLinear")),
        Scheme("fp8-block", "an old name that runs as fp8", _rows_why_not, _native("Fp8RowLinear")),
        Scheme("fp8-weights", "FP8 in memory, bf16 products", _anywhere, _native("Fp8WeightLinear")),
        Scheme(
            "te-delayed",
            "Transformer Engine, scales from the amax history",
            _engine_why_not("te-delayed"),
            _engine("TEDelayedLinear"),
        ),
        Scheme(
            "te-current",
            "Transformer Engine, one scale for a tensor",
            _engine_why_not("te-current"),
            _engine("TECurrentLinear"),
        ),
        Scheme(
            "te-block",
            "Transformer Engine, scales for blocks of 128",
            _engine_why_not("te-block"),
            _engine("TEBlockLinear"),
        ),
    )
}
assert tuple(SCHEMES) == QUANTIZED


def resolve_scheme(precision: str, device: torch.device) -> Scheme | None:
    """The scheme of `precision` on `device`; None for a precision that quantises nothing.

    Raises OptionError for a scheme that cannot run here, saying why and what can.
    """
    scheme = SCHEMES.get(precision)
    reason = None if scheme is None else scheme.why_not(device)
    if precision == "fp8-block":
        log.warning("precision fp8-block (scales for blocks of 128) is gone because fp8 is faster: running as fp8")
    if reason is not None:
        raise OptionError(
            f"precision {precision!r} cannot run on {device}: {reason}. `python -m wan_core doctor` lists what can."
        )
    return scheme
