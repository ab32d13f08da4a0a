"""Suite `attention`: every dense attention kernel that runs here, on one layer of A14B.

A row is the time of a backend or of FlexAttention, all heads; `ratio` is over torch's own kernel. Errors are against
the formula in float32, for some queries of some heads over all keys: on normal numbers (`error`); with keys that have
a mean (`offset`); with four channels of q and k 12 times larger (`outliers`); with a few keys that every query looks
at (`sinks`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import parse_size
from benchmarks.measure import make_room, measure, relative_error
from benchmarks.rows import Row, guarded
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sdpa import math_reference
from wan_core.ops.attention.sparse.kernels import KERNELS

QUERIES, HEADS = 512, 4  # of which errors are measured
BASE = "sdpa"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Data = tuple[Tensor, Tensor, Tensor]


def attention_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    dtype, heads, dim = (torch.bfloat16, 40, 128) if device.type == "cuda" else (torch.float32, 2, 64)
    for size in sizes:
        width, height, frames = parse_size(size)
        tokens = ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)
        make_room(device)
        yield from kernel_rows(size, normal(tokens, heads, dim, dtype, device), options.runs or 5)


def kernel_rows(size: str, data: Data, runs: int) -> Iterator[Row]:
    device, dtype, dim = data[0].device, data[0].dtype, data[0].shape[-1]
    checked = checked_data(data)
    base = None
    names = [BASE, *(name for name in BACKENDS if name != BASE and not name.startswith("math"))]
    for name in [*names, "flex"]:
        reason = (KERNELS if name == "flex" else BACKENDS)[name].why_not(device, dtype, dim)
        row = guarded(name, size, reason, lambda n=name: timed(attend_of(n, device), data, checked, runs))
        base = row.get("seconds") if base is None else base
        if base and "seconds" in row:
            row |= {"ratio": base / row["seconds"], "ratio_to": BASE}
        yield row


def attend_of(name: str, device: torch.device) -> Attend:
    return flex(device) if name == "flex" else BACKENDS[name].load()


@functools.cache
def flex(device: torch.device) -> Attend:
    """torch's FlexAttention without a mask."""
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    return lambda q, k, v: run(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


@torch.no_grad()
def timed(attend: Attend, data: Data, checked: dict[str, Data], runs: int) -> Row:
    q, k, v = data
    measured = measure(lambda: lambda: attend(q, k, v), q.device, runs)
    operations = 4 * q.shape[1] * k.shape[1] * q.shape[2] * q.shape[3] * q.shape[0]
    row: Row = {"seconds": measured.median, "tflops": operations / measured.median / 1e12}
    for label, some in checked.items():
        row[label] = relative_error(attend(*some).float(), math_reference(*(x.float() for x in some)))
    return row


# ---------------------------------------------------------------------------------------------------------------- data


def normal(tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Data:
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, tokens, heads, dim
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3))
    return q, k, v


def checked_data(data: Data) -> dict[str, Data]:
    """Some queries of some heads with all their keys, by the name of the column."""
    q, k, v = (x[:, :, :HEADS] for x in data)
    q = q[:, :QUERIES]
    wide = torch.ones(q.shape[-1], device=q.device, dtype=q.dtype)
    wide[:4] = 12
    sunk = k.clone()
    sunk[:, :4] += 3 * q.mean(1, keepdim=True) + 0.5
    return {
        "error": (q, k, v),
        "offset": (2 * q, k + 2, v),
        "outliers": (q * wide, k * wide, v),
        "sinks": (q + 0.5, sunk, v),
    }
