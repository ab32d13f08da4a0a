"""Rows of the ladder: the ways in which this engine runs one transformer, each adding a technique to another.

A setup that cannot run on this device says why (`why_not`), and its row shows that in place of numbers.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.always_sparse import AlwaysSparse
from wan_core.config import QUANTIZED, LoadOptions, OptionError
from wan_core.execution.optimize import optimize
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import BACKENDS, resolve_attention
from wan_core.ops.attention.sparse.kernels import KERNELS
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
    keep: float = 1.0  # share of the blocks of keys that self-attention reads, in every layer and step

    def __post_init__(self) -> None:
        if self.precision not in (PLAIN, *QUANTIZED):
            raise OptionError(f"precision {self.precision!r} given; use one of {', '.join((PLAIN, *QUANTIZED))}")
        if self.attention not in BACKENDS:
            raise OptionError(f"attention {self.attention!r} given; use one of {', '.join(BACKENDS)}")
        if not 0 < self.keep <= 1:
            raise OptionError(f"keep {self.keep} given; it is a share of the blocks of keys, above 0 and up to 1")

    @property
    def fp8_linears(self) -> bool:
        """Whether products of the linears run on FP8 units."""
        return self.precision not in (PLAIN, "fp8-weights")

    @property
    def fp8_attention(self) -> bool:
        return self.attention.endswith("-fp8")

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int | None = None) -> str | None:
        """None where it runs on `device`, on a model of `dtype` with heads of `head_dim`; else why, and what to do."""
        if self.precision != PLAIN and (reason := SCHEMES[self.precision].why_not(device)):
            return f"{self.precision}: {reason}"
        if reason := BACKENDS[self.attention].why_not(device, dtype, head_dim):
            return f"{self.attention}: {reason}"
        if self.kernels == "triton" and (reason := fused.why_not(device)):
            return f"fused kernels: {reason}"
        if self.keep < 1 and device.type == "cuda":
            kernel = KERNELS["cudnn-fp8" if self.fp8_attention else "cudnn"]
            if reason := kernel.why_not(device, dtype, head_dim):
                return f"sparse {kernel.name}: {reason}"
        return None

    def quantization(self, device: torch.device) -> Quantization | None:
        """How the linears are held, for the caller that makes the model; None for plain linears."""
        return None if self.precision == PLAIN else find_quantization(self.precision, device)

    def apply(self, model: WanModel, **shared: Any) -> WanModel:
        """Make `model`, which holds its weights as `quantization` says, run so, in place. shared: `ranks` and what else
        `optimize` takes of those that share it."""
        AlwaysSparse.remove(model)
        weight, config = model.patch_embedding.weight, model.config
        needs_lse = config.merges_attention
        _, attend = resolve_attention(self.attention, weight.device, weight.dtype, config.head_dim, needs_lse=needs_lse)
        optimize(model, attend=attend, compile=self.compile, **shared)
        return AlwaysSparse.install(model, self.keep) if self.keep < 1 else model

    def load_options(self, model: str, device: torch.device) -> LoadOptions:
        """The same for a whole pipeline, all of it resident; how much is read is then up to its requests."""
        return LoadOptions(
            model=model,
            device=str(device),
            precision="checkpoint" if self.precision == PLAIN else self.precision,
            attention=self.attention,
            compile=self.compile,
            residency="resident",
        )

    def running(self) -> AbstractContextManager[None]:
        """Around every forward of a model that it was applied to."""
        return fused.use("torch") if self.kernels == "torch" else nullcontext()


BEST = "flash4"  # of the bf16 backends on Hopper
SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup("plain torch", kernels="torch"),
        Setup("+ fused kernels"),
        Setup("+ flash4", attention="flash4"),
        Setup("+ compile", attention="flash4", compile="blocks"),
        Setup("fp8", "fp8", BEST),
        Setup("fp8-tensor", "fp8-tensor", BEST),
        Setup("fp8-weights", "fp8-weights", BEST),
        Setup("te-delayed", "te-delayed", BEST),
        Setup("te-current", "te-current", BEST),
        Setup("te-block", "te-block", BEST),
        Setup("fp8 + compile", "fp8", BEST, compile="blocks"),
        Setup("fp8 + cudnn-fp8", "fp8", "cudnn-fp8"),
        Setup("fp8 + cudnn-fp8 + compile", "fp8", "cudnn-fp8", compile="blocks"),
        Setup("fp8 + sparse 50 %", "fp8", "cudnn-fp8", keep=0.5),
        Setup("fp8 + sparse 25 %", "fp8", "cudnn-fp8", keep=0.25),
        Setup("fp8 + sparse 12.5 %", "fp8", "cudnn-fp8", keep=0.125),
        Setup("fp8 + sparse bf16 25 %", "fp8", BEST, keep=0.25),
    )
}
REFERENCE = SETUPS["plain torch"]  # what errors are measured against


def find_setup(name: str) -> Setup:
    """A setup by its name in the table, or as PRECISION/ATTENTION[/torch][/compile][/N%]. Raises OptionError."""
    if name in SETUPS:
        return SETUPS[name]
    precision, _, rest = name.partition("/")
    attention, *more = rest.split("/")
    shares = [part for part in more if re.fullmatch(r"\d+(\.\d+)?%", part)]
    if not attention or not set(more) - set(shares) <= {"torch", "compile"} or len(shares) > 1:
        raise OptionError(
            f"setup {name!r} is not known; use one of: {', '.join(SETUPS)}; or PRECISION/ATTENTION with /torch, "
            "/compile and the share of the keys that is read after it, for example fp8/sdpa/torch or fp8/flash4/25%"
        )
    kernels = "torch" if "torch" in more else "triton"
    keep = float(shares[0][:-1]) / 100 if shares else 1.0
    return Setup(name, precision, attention, kernels, "blocks" if "compile" in more else "off", keep)
