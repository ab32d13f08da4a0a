"""Setting `rest` of suite `sparse`: what replaces the blocks that are not read, at the same budgets.

Each way alone and together: seconds of one layer's attention, and its error against dense attention, as the norm of the
difference over that of the output. On a GPU 40 heads at the size given, on random and on structured numbers
(`benchmarks.structured`). On a CPU small ones, and q, k and v of the embedded model on a trajectory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import parse_size
from benchmarks.measure import make_room, measure
from benchmarks.rows import Row, guarded
from benchmarks.structured import structured
from wan_core.config import LoadOptions, Request, SparseOptions
from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.sdpa import sdpa
from wan_core.ops.attention.sparse.forward import SparseAttention, SparseForward, SparseFp8Attention
from wan_core.ops.attention.sparse.kernels import KERNELS, SparseKernel
from wan_core.ops.attention.sparse.routing import Rule
from wan_core.ops.attention.sparse.tiles import Grid, Tiles, make_tiles
from wan_core.ops.kernels.blocked import quantize_heads_first, quantize_values
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles
from wan_core.sampling.sparsity.schedule import parse_sparse

KEEPS = (0.25, 0.125, 0.0625)
WAYS = ("", "error", "slope", "slope:error", "parts2", "parts4", "parts4:error", "parts4:slope", "parts4:slope:error")
HEADS, DIM = 40, 128
STEPS = (0, 3, 7, 12, 16, 19)  # of 20, of the embedded model's run
SMALL: Grid = (6, 16, 20)


class Data(NamedTuple):
    """q, k, v [1, L, H, D] in raster order, of one or more layers, read in blocks of `block`."""

    name: str
    grid: Grid
    block: int
    layers: list[tuple[Tensor, Tensor, Tensor]]


def rest_rows(size: str, device: torch.device, dtype: torch.dtype, runs: int) -> Iterator[Row]:
    cuda = device.type == "cuda"
    for data in drawn(size, device, dtype) if cuda else small():
        for name in ("cudnn-fp8", "cudnn", "triton") if cuda else ("math",):
            kernel = KERNELS[name]
            for keep in KEEPS:
                for way in WAYS:
                    label = f"{data.name}, {name}, {100 * keep:g} %, {way or 'means'}"
                    reason = kernel.why_not(device, dtype, data.layers[0][0].shape[-1])
                    make_room(device)
                    yield guarded(label, size if cuda else "small", reason, lambda: one(data, kernel, keep, way, runs))  # noqa: B023


def drawn(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Data]:
    width, height, frames = parse_size(size)
    grid = (frames - 1) // 4 + 1, height // 16, width // 16
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, grid[0] * grid[1] * grid[2], HEADS, DIM
    numbers = [torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3)]
    yield Data("random", grid, 128, [(numbers[0], numbers[1], numbers[2])])
    q, k, v = (x.to(device, dtype) for x in structured(grid, HEADS, DIM))
    yield Data("structured", grid, 128, [(q, k, v)])


def small() -> Iterator[Data]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1920, 2, 64, generator=generator)
    yield Data("random", SMALL, 32, [(q, k, v)])
    yield Data("structured", SMALL, 32, [structured(SMALL, 6, 64)])
    for frames, block in ((81, 8), (241, 16)):
        grid, layers = trajectory(frames)
        yield Data(f"embedded model, {frames} frames", grid, block, layers)


def trajectory(frames: int) -> tuple[Grid, list[tuple[Tensor, Tensor, Tensor]]]:
    """q, k and v of every layer of the embedded model, at six steps of a dense run."""
    request = Request(prompt="a red circle moving right on a blue background", frames=frames, steps=20, seed=3)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=request)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    grid, calls = ((frames - 1) // 4 + 1, 6, 6), [0]

    def look(layer: int, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> None:
        calls[0] += layer == 0
        per_step = 1 if q.shape[0] > 1 else 2  # branches of guidance together, or one after the other
        if (calls[0] - 1) % per_step == 0 and (calls[0] - 1) // per_step in STEPS:
            q, k, v = (x[:1, tiles.inverse].float() for x in (q, k, v))
            seen.append((q, k, v))

    with ExitStack() as held:
        for expert in ("high", "low"):
            model = pipe.models.expert(expert)
            watch = SparseTiles(model, SparseOptions(sparsity=0), None, grid, observe=look)
            held.enter_context(in_tiles(model, watch))
        pipe.generate(request)
    return grid, seen


@torch.no_grad()
def one(data: Data, kernel: SparseKernel, keep: float, way: str, runs: int) -> Row:
    options = parse_sparse(f"{1 - keep:g}/0/0" + (f":{way}" if way else ""))
    device = data.layers[0][0].device
    tiles = make_tiles(data.grid, data.block, device, parts=options.parts)
    state = SparseForward(kernel, [], tiles, [Rule(keep, score=options.score)], slope=options.slope)
    lost = whole = 0.0
    row: dict[str, Any] = {}
    for number, layer in enumerate(data.layers):
        q, k, v = (x[:, tiles.order] for x in layer)
        run = prepared(kernel, state, q, k, v, data.block)
        if not number:
            row = measure(lambda: run, device, runs).numbers()  # noqa: B023
        found, exact = run().float(), sdpa(q, k, v).float()
        lost += float((found - exact).square().sum())
        whole += float(exact.square().sum())
    return {**row, "error": round((lost / whole) ** 0.5, 5)}


def prepared(kernel: SparseKernel, state: SparseForward, q: Tensor, k: Tensor, v: Tensor, block: int) -> Any:
    """The attention of a block, from q, k and v as a block hands them over; the same numbers out."""
    call = AttentionCall(sparse=state)
    if not kernel.fp8:
        return lambda: SparseAttention()(q, k, v, call)
    laid = quantize_heads_first(q, block), quantize_heads_first(k, block, key_mean(k))
    values = quantize_values(v.flatten(-2), v.shape[2], block)
    attend = SparseFp8Attention(block)
    return lambda: attend.quantized(*laid, values, call).dequantize()
