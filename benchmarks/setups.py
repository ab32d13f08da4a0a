"""Rows of the ladder: the ways in which this engine runs one transformer, each adding a technique to another.

A setup that cannot run on this device says why (`why_not`), and its row shows that in place of numbers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from wan_core.config import QUANTIZED, OptionError
from wan_core.execution.optimize import optimize
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import BACKENDS, resolve_attention
from wan_core.ops.kernels import fused
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.settings import find_quantization

PLAIN = "plain"  # the precision of a setup that quantises nothing: that of the model


@dataclass(frozen=True)
class Setup:
    """How a transformer is run. `precision` is "plain" or one of `QUANTIZED`; `attention` a backend by name, never
    "auto": a row says what it measured."""

    name: str
    precision: str = PLAIN
    attention: str = "sdpa"
    kernels: Literal["triton", "torch"] = "triton"
    compile: Literal["off", "blocks"] = "off"

    def __post_init__(self) -> None:
        if self.precision not in (PLAIN, *QUANTIZED):
            raise OptionError(f"precision {self.precision!r} given; use one of {', '.join((PLAIN, *QUANTIZED))}")
        if self.attention not in BACKENDS:
            raise OptionError(f"attention {self.attention!r} given; use one of {', '.join(BACKENDS)}")

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int | None = None) -> str | None:
        """None where it runs on `device`, on a model of `dtype` with heads of `head_dim`; else why, and what to do."""
        if self.precision != PLAIN and (reason := SCHEMES[self.precision].why_not(device)):
            return f"{self.precision}: {reason}"
        if reason := BACKENDS[self.attention].why_not(device, dtype, head_dim):
            return f"{self.attention}: {reason}"
        if self.kernels == "triton" and (reason := fused.why_not(device)):
            return f"fused kernels: {reason}"
        return None

    def quantization(self, device: torch.device) -> Quantization | None:
        """How the linears are held, for the caller that makes the model; None for plain linears."""
        return None if self.precision == PLAIN else find_quantization(self.precision, device)

    def apply(self, model: WanModel) -> WanModel:
        """Make `model`, which holds its weights as `quantization` says, run so, in place."""
        weight, config = model.patch_embedding.weight, model.config
        needs_lse = config.merges_attention
        _, attend = resolve_attention(self.attention, weight.device, weight.dtype, config.head_dim, needs_lse=needs_lse)
        return optimize(model, attend=attend, compile=self.compile)

    def running(self) -> AbstractContextManager[None]:
        """Around every forward of a model that it was applied to."""
        return fused.use("torch") if self.kernels == "torch" else nullcontext()


SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup("plain torch", kernels="torch"),
        Setup("+ flash4", attention="flash4"),
        Setup("fp8", "fp8", "flash4"),
        Setup("fp8 + cudnn-fp8", "fp8", "cudnn-fp8"),
    )
}
REFERENCE = SETUPS["plain torch"]  # what errors are measured against


def find_setup(name: str) -> Setup:
    """A setup by its name in the table, or as PRECISION/ATTENTION[/torch][/compile]. Raises OptionError."""
    if name in SETUPS:
        return SETUPS[name]
    precision, _, rest = name.partition("/")
    attention, *more = rest.split("/")
    if not attention or not set(more) <= {"torch", "compile"}:
        raise OptionError(
            f"setup {name!r} is not known; use one of: {', '.join(SETUPS)}; or PRECISION/ATTENTION with /torch and "
            "/compile after it, for example fp8/sdpa/torch"
        )
    kernels = "torch" if "torch" in more else "triton"
    return Setup(name, precision, attention, kernels, "blocks" if "compile" in more else "off")
