"""Suite `int8`: a forward with the weights of an INT8 file (ConvRot), run in each way that there is.

seconds          median of one forward of one branch with `--layers` blocks (4 on a GPU)
scaled_seconds   the same for all blocks of the model: seconds x blocks of the model / blocks measured
error            relative difference of the velocity from that of bf16 on the same random weights
weights_gib      of all parameters; `peak_gib`: most on the device while a forward runs
ratio            seconds of bf16 at the same size over this row's

bf16                   the weights before they were rounded
fp8                    encoded as FP8 rows from bf16: precision `fp8` of a bf16 file
int8                   as stored, by comfy-kitchen; `int8, torch`: by torch's INT8 matmul
int8 as fp8            the INT8 weights encoded as FP8 rows: what `checkpoint` does where FP8 is faster
int8 as fp8, rotated   the same in the rotated basis of the file; inputs are rotated by torch. For this comparison only

Attention is the one that `auto` takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import make_case, plain_model
from benchmarks.measure import make_room, measure, relative_error, weights_bytes
from benchmarks.rows import Row, guarded
from wan_core.execution.optimize import optimize
from wan_core.execution.report import GIB
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.kernels.formats import Quantized
from wan_core.ops.kernels.integer_weights import rotate, rotation_of
from wan_core.ops.quant import int8
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.linear import QuantLinear
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.sources import RANDOM

LAYERS = 4  # of a forward on a GPU, unless said
EXACT = "bf16"


def decoded(weight: Tensor) -> Tensor:
    """The numbers [N, K] that an INT8 file holds of `weight`."""
    parts = int8.Int8Linear.encode(weight)
    return int8.unpack(int8.Int8Linear(weight.shape[1], weight.shape[0]).packing, parts, torch.float32)


class TorchLinear(int8.Int8Linear):
    """INT8 as stored, without comfy-kitchen."""

    def product(self, x: Tensor) -> Tensor:
        rows, scale = x.flatten(0, -2), self.weight_scale.flatten()
        out = int8.torch_linear(rows, self.weight, scale, self.bias, rotation_of(self.in_features))
        return out.unflatten(0, x.shape[:-1])


class ReencodedLinear(Fp8RowLinear):
    """FP8 rows of weights that were INT8."""

    @classmethod
    def encode(cls, weight: Tensor) -> dict[str, Tensor]:
        return super().encode(decoded(weight))


class RotatedLinear(Fp8RowLinear):
    """FP8 rows of weights that were INT8, in the rotated basis."""

    fmt = None  # no fused kernel rotates
    takes_fp8 = False

    @classmethod
    def encode(cls, weight: Tensor) -> dict[str, Tensor]:
        return super().encode(rotate(decoded(weight), rotation_of(weight.shape[1])))

    def quantize(self, x: Tensor) -> Quantized:
        return super().quantize(rotate(x, rotation_of(self.in_features)))


@dataclass(frozen=True)
class Way:
    """kind: of the linears; None: plain ones."""

    name: str
    kind: type[QuantLinear] | None
    why_not: Callable[[torch.device], str | None] = lambda device: None


WAYS = (
    Way(EXACT, None),
    Way("fp8", Fp8RowLinear, SCHEMES["fp8"].why_not),
    Way("int8", int8.Int8Linear, int8.why_not_kitchen),
    Way("int8, torch", TorchLinear, int8.why_not_multiply),
    Way("int8 as fp8", ReencodedLinear, SCHEMES["fp8"].why_not),
    Way("int8 as fp8, rotated", RotatedLinear, SCHEMES["fp8"].why_not),
)


def int8_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Raises OptionError for a bad size. A CPU computes in --precision, a GPU in bf16 unless said."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    layers = options.layers or (LAYERS if device.type == "cuda" else None)
    exact: dict[str, tuple[Tensor, float]] = {}
    for way in WAYS:
        built: list[tuple[WanModel, int]] = []

        def row(size: str, way: Way = way, built: list[tuple[WanModel, int]] = built) -> Row:
            if not built:
                held = None if way.kind is None else Quantization(way.kind, device)
                built.append(plain_model(name, device, dtype, layers, held))
                attention, attend = resolve_attention("auto", device, dtype, built[0][0].config.head_dim)
                optimize(built[0][0], attend=attend, graphs=False)
                details.update(dtype=options.precision, attention=attention, layers=built[0][0].config.num_layers)
            return measured(name, built[0], size, options.runs or 2, exact)

        for size in sizes:
            yield guarded(way.name, size, way.why_not(device), lambda s=size, r=row: r(s))
        built.clear()
        make_room(device)


def measured(
    name: str, built: tuple[WanModel, int], size: str, runs: int, exact: dict[str, tuple[Tensor, float]]
) -> Row:
    """exact: velocity and seconds of the first row of each size."""
    model, stride = built
    case = make_case(model, size, stride)
    text = model.prepare_text(case.contexts[0])
    found = measure(lambda: lambda: model(case.x, case.timestep, text), case.x.device, runs)
    base, seconds = exact.setdefault(size, (found.output, found.median))
    blocks = model.config.num_layers
    return {
        "tokens": case.tokens,
        **found.numbers(),
        "scaled_seconds": round(found.median * all_blocks(name, blocks) / blocks, 4),
        "weights_gib": round(weights_bytes(model) / GIB, 3),
        "error": relative_error(found.output, base),
        "ratio": round(seconds / found.median, 4),
        "ratio_to": EXACT,
    }


def all_blocks(name: str, measured: int) -> int:
    """Blocks of the model called `name`, of which `measured` were."""
    task = name.removeprefix("random:")
    return RANDOM[task][0].num_layers if task in RANDOM else measured
