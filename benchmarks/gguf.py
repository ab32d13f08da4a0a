"""Suite `gguf`: one transformer from GGUF files, against the same weights in bf16 and in FP8.

The files are written into --scratch first (a temporary folder if it is not given), out of random weights, and removed
at the end. A row for each of:

bf16, fp8         the weights as they are drawn, and encoded
FORMAT            packed in memory, widened for each product
FORMAT as fp8     encoded as FP8 while the file is read

load_seconds      from the file, which is in the page cache, to weights that are ready on the device
seconds, spread   median of one forward of one branch (batch 1), and the range of the runs
widen_ms          of that, widening all matrices once; `widen_torch_ms` without the kernel, for comparison
weights_gib       of device memory; `peak_gib` at most while a forward runs; `file_gib` the file
error             relative difference of the velocity from that of bf16
ratio             seconds of bf16 over this row's
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import make_case, plain_model
from benchmarks.gguf_files import ENCODERS, write_gguf
from benchmarks.measure import make_room, measure, relative_error, settle, weights_bytes
from benchmarks.rows import Row, guarded
from wan_core.checkpoint import load_dit
from wan_core.config import OptionError
from wan_core.execution.optimize import optimize
from wan_core.execution.report import GIB
from wan_core.models.wan.linears import quantized_names
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.gguf_blocks import FORMATS
from wan_core.ops.quant.packed import PRECISION, PackedLinear
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.pipeline.settings import find_quantization


def gguf_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the suite. Raises OptionError for a --scratch that is no folder."""
    scratch: Path | None = options.scratch
    if scratch is not None and not scratch.is_dir():
        raise OptionError(f"--scratch {scratch} is no folder: make it, or leave it out")
    with tempfile.TemporaryDirectory(prefix="wancore-gguf-", dir=scratch) as folder:
        yield from Measuring(name, sizes, device, options, Path(folder)).rows(details)


def options_name(dtype: torch.dtype) -> str:
    """bf16 or fp32, as --precision calls it."""
    return "bf16" if dtype == torch.bfloat16 else "fp32"


class Measuring:
    """What the rows of one run share."""

    def __init__(
        self, name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, folder: Path
    ) -> None:
        self.name, self.sizes, self.device, self.folder = name, sizes, device, folder
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
        self.layers, self.runs = options.layers, options.runs or 3
        self.exact: dict[str, tuple[Tensor, float]] = {}  # size -> output and seconds of the first row
        self.stride = 8

    def rows(self, details: dict[str, Any]) -> Iterator[Row]:
        model, self.stride = plain_model(self.name, self.device, self.dtype, self.layers)
        config = model.config
        attention, _ = resolve_attention("auto", self.device, self.dtype, config.head_dim)
        details |= {
            "layers": config.num_layers,
            "dtype": options_name(self.dtype),
            "attention": attention,
        }
        whole = [model]  # the only other reference to it, so that it can be let go
        del model
        yield from self.forwards(options_name(self.dtype), lambda: whole[0], {})
        files = {fmt: self.write(whole[0], fmt) for fmt in ENCODERS}
        whole.clear()
        make_room(self.device)
        reason = SCHEMES["fp8"].why_not(self.device)
        held = None if reason else find_quantization("fp8", self.device)
        yield from self.forwards(
            "fp8", lambda: plain_model(self.name, self.device, self.dtype, self.layers, held)[0], {}, reason
        )
        for fmt, (path, why_not) in files.items():
            size = {} if path is None else {"file_gib": round(path.stat().st_size / GIB, 3)}
            for label, precision in ((fmt, PRECISION), (f"{fmt} as fp8", "fp8")):
                missing = why_not or (reason if precision == "fp8" else None)
                yield from self.forwards(label, lambda p=path, q=precision: self.load(p, q), size, missing)

    def write(self, model: WanModel, fmt: str) -> tuple[Path | None, str | None]:
        """(the file, None), or (None, why this model cannot be packed so)."""
        names = sorted(f"{name}.weight" for name in quantized_names(model.config))
        state = model.state_dict()
        odd = next((k for name in names if (k := state[name].shape[-1]) % FORMATS[fmt].numbers), None)
        if odd is not None:
            return None, f"rows of {odd} numbers are no multiple of the {FORMATS[fmt].numbers} of a block of {fmt}"
        path = self.folder / f"{fmt}.gguf"
        notes = {key: str(getattr(model.config, key)) for key in ("num_heads", "text_len", "eps")}
        write_gguf(path, state, dict.fromkeys(names, fmt), notes)
        return path, None

    def load(self, path: Path | None, precision: str) -> WanModel:
        assert path is not None
        held = find_quantization(precision, self.device)
        return load_dit(path, device=self.device, dtype=self.dtype, quantization=held)

    def forwards(
        self, label: str, make: Callable[[], WanModel], more: Row, why_not: str | None = None
    ) -> Iterator[Row]:
        """A row for each size of the model that `make` makes."""
        built: list[tuple[WanModel, float]] = []

        def row(size: str) -> Row:
            if not built:
                settle(self.device)
                begin = time.perf_counter()
                model = make()
                settle(self.device)
                seconds = time.perf_counter() - begin
                attend = resolve_attention("auto", self.device, self.dtype, model.config.head_dim)[1]
                built.append((optimize(model, attend=attend, device=self.device), seconds))
            model, seconds = built[0]
            numbers = self.measured(model, size)
            return more | ({"load_seconds": round(seconds, 3)} if more else {}) | numbers

        for size in self.sizes:
            yield guarded(label, size, why_not, lambda s=size: row(s))
        built.clear()
        make_room(self.device)

    def measured(self, model: WanModel, size: str) -> Row:
        case = make_case(model, size, self.stride)

        def prepare() -> Callable[[], Tensor]:
            text = model.prepare_text(case.contexts[0])
            return lambda: model(case.x, case.timestep, text)

        measured = measure(prepare, self.device, self.runs)
        exact, seconds = self.exact.setdefault(size, (measured.output.cpu(), measured.median))
        return {
            "tokens": case.tokens,
            **measured.numbers(),
            "weights_gib": round(weights_bytes(model) / GIB, 3),
            "error": relative_error(measured.output.cpu(), exact),
            "ratio": round(seconds / measured.median, 4),
            "ratio_to": options_name(self.dtype),
            **self.widening(model),
        }

    def widening(self, model: WanModel) -> Row:
        """How long it takes to widen all packed matrices once, with the kernel and without."""
        linears = [m for m in model.modules() if isinstance(m, PackedLinear)]
        if not linears:
            return {}

        def widen() -> Tensor:
            for linear in linears:
                out = linear.dequantize(self.dtype)
            return out[:1, :1].clone()

        found: Row = {}
        for key, kernels in (("widen_ms", "triton"), ("widen_torch_ms", "torch")):
            with fused.use(kernels):  # type: ignore[arg-type]
                found[key] = round(measure(lambda: widen, self.device, self.runs).median * 1000, 2)
        return found
