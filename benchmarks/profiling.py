"""Suite `profile`: where the time of one forward goes, by class of kernel, and how long the device waits in between.

Each row is a class of one setup at one size: `seconds` summed over its kernels, `calls`, `share` of the forward. Two
more rows: `idle`, the gaps in which no kernel ran, and `forward`, from the first kernel's begin to the last one's end.
Kernels that run at the same time count in full, so shares may sum to a little over one.

`details["kernels"]` of the file lists the longest kernels by name, to see what a class is made of.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import Case, make_case, plain_model
from benchmarks.measure import make_room, settle
from benchmarks.rows import Row, guarded
from benchmarks.setups import Setup, find_setup

# Which class a kernel belongs to, by its name: of this project's Triton kernels, cuDNN, cuBLAS (nvjet, xmma), CUTLASS,
# flash-attn-4, Transformer Engine, Inductor and torch itself; on a CPU, of torch's operators. The first pattern found
# decides, so what is special stands before what is general. A fused kernel counts once, under the class that names it:
# `norm` has the residual before it and the quantisation after it in it, `rope` the norm of queries and keys.
PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("norm", r"^_residual_norm_kernel"),
        ("rope", r"^_head_norm_kernel"),
        ("gelu, quantise", r"^_activate_kernel"),
        ("quantise", r"^_scale_kernel"),
        ("copy", r"^mem(cpy|set)|CatArrayBatchedCopy|transpose_kernel"),
        ("attention", r"sdpa|fmha|flash_?(fwd|fprop|attention|attn)|scaled_dot_product|qk_int8"),  # before products
        # FP8 products name their type; in cuBLAS's nvjet the letters stand for types, q for E4M3, s for float32
        ("gemm fp8", r"nvjet_(sm\d+_)?q|(gemm|device_kernel).*e4m3|_scaled_mm"),
        ("quantise", r"transformer_engine|quantiz|amax|absmax|float8|e4m3"),
        ("gemm fp32", r"sgemm|gemm_f32f32|nvjet_(sm\d+_)?s(?!m\d)|gemv\w*<.*\bfloat\b"),
        ("gemm bf16", r"nvjet|gemm|cutlass|splitk"),
        ("gemm", r"^aten::(linear|addmm|mm|bmm|baddbmm|matmul)$"),
        ("norm", r"layer_?norm|rms_?norm"),
        ("gelu", r"gelu"),
        ("rope", r"complex|view_as_real"),
        ("copy", r"copy|^aten::(clone|contiguous|cat|to|type_as)$"),
        ("residual", r"addcmul|add|mul"),
    )
)
CLASSES = (*dict.fromkeys(kind for kind, _ in PATTERNS), "other")


def kernel_class(name: str) -> str:
    """One of `CLASSES`."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "other")


DEFAULT_SETUPS = ("+ compile", "fp8 + cudnn-fp8 + compile")
LISTED = 40  # kernels by name


class Kernel(NamedTuple):
    """One run of one kernel; microseconds on the device's clock."""

    name: str
    begin: float
    end: float


def profile_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows for each size and setup; one row with the reason where a setup cannot run."""
    default = DEFAULT_SETUPS if device.type == "cuda" else ("plain torch",)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    details["kernels"] = {}
    for setup in [find_setup(entry) for entry in options.setup or default]:
        make_room(device)
        reason = setup.why_not(device, dtype)
        if reason is not None:
            yield {"name": setup.name, "size": sizes[0], "why_not": reason}
            continue
        model, stride = plain_model(name, device, dtype, options.layers, setup.quantization(device))
        details["layers"] = model.config.num_layers
        setup.apply(model)
        for case in [make_case(model, size, stride) for size in sizes]:
            row = guarded(setup.name, case.size, None, lambda s=setup, c=case: {"kernels": record(s, c)})
            kernels: list[Kernel] | None = row.pop("kernels", None)
            if kernels is None:
                yield row
                continue
            details["kernels"][f"{setup.name}, {case.size}"] = longest(kernels)
            yield from (row | each for each in by_class(kernels))


@torch.no_grad()
def record(setup: Setup, case: Case) -> list[Kernel]:
    """The kernels of one forward after two that compile and warm up. On a CPU: torch's operators, with what they
    call."""
    device = case.x.device
    cuda = device.type == "cuda"
    with setup.running():
        text = case.model.prepare_text(case.contexts[0])
        for _ in range(2):
            case.model(case.x, case.timestep, text)
        settle(device)
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
            case.model(case.x, case.timestep, text)
            settle(device)
    events = profiled.events() or []
    if cuda:
        # compiled code marks its regions on the device's timeline as well: not kernels
        events = [e for e in events if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False)]
    else:
        events = [e for e in events if e.name.startswith("aten::") and e.cpu_parent is None]
    return [Kernel(e.name, e.time_range.start, e.time_range.end) for e in events]


@dataclass(frozen=True)
class Span:
    """The time that a list of kernels spans and is busy, in microseconds."""

    whole: float
    busy: float

    @staticmethod
    def of(kernels: Iterable[Kernel]) -> Span:
        """The union of their times, so that what overlaps counts once."""
        ordered = sorted(kernels, key=lambda kernel: kernel.begin)
        if not ordered:
            return Span(0.0, 0.0)
        busy, until = 0.0, ordered[0].begin
        for kernel in ordered:
            busy += max(0.0, kernel.end - max(kernel.begin, until))
            until = max(until, kernel.end)
        return Span(until - ordered[0].begin, busy)


def by_class(kernels: list[Kernel]) -> list[Row]:
    """A row for each class that occurs, the longest first, then `idle` and `forward`."""
    span = Span.of(kernels)
    seconds: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for kernel in kernels:
        kind = kernel_class(kernel.name)
        seconds[kind] += kernel.end - kernel.begin
        calls[kind] += 1
    assert seconds.keys() <= set(CLASSES)
    rows = [_row(kind, value, calls[kind], span.whole) for kind, value in falling(seconds)]
    rows.append(_row("idle", span.whole - span.busy, 0, span.whole))
    return [*rows, _row("forward", span.whole, len(kernels), span.whole)]


def _row(kind: str, microseconds: float, calls: int, whole: float) -> Row:
    share = round(microseconds / whole, 4) if whole else 0.0
    return {"class": kind, "seconds": round(microseconds / 1e6, 6), "share": share, "calls": calls}


def longest(kernels: list[Kernel]) -> list[Row]:
    """The kernels that took most time by name, with their class."""
    seconds: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for kernel in kernels:
        seconds[kernel.name] += kernel.end - kernel.begin
        calls[kernel.name] += 1
    return [
        {"name": name[:160], "class": kernel_class(name), "seconds": round(value / 1e6, 6), "calls": calls[name]}
        for name, value in falling(seconds)[:LISTED]
    ]


def falling(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def profile_table(rows: list[Row]) -> str:
    """Markdown: a column of milliseconds and shares for each setup and size, a row for each class."""
    columns = list(dict.fromkeys((row["name"], row["size"]) for row in rows))
    cells = {(row["name"], row["size"], row["class"]): row for row in rows if "class" in row}
    classes = [kind for kind in (*CLASSES, "idle", "forward") if any(key[2] == kind for key in cells)]
    lines = ["| class | " + " | ".join(f"{name}, {size}: ms (share)" for name, size in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for kind in classes:
        found = [cells.get((*column, kind)) for column in columns]
        texts = [f"{row['seconds'] * 1000:.1f} ({row['share']:.1%})" if row else "" for row in found]
        lines.append(f"| {kind} | " + " | ".join(texts) + " |")
    reasons = [(row["name"], row.get("why_not") or row.get("failed")) for row in rows if "class" not in row]
    return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in reasons)])
