"""Part `equal` of suite `attention`: sparse attention of comfy-kitchen and ours on one layer, compared at equal error.

q, k and v are structured like those of video models (`benchmarks.structured`): the error of a share of the blocks says
nothing on random numbers. 40 heads on a GPU, which repeat HEADS different ones. Rows:

int8                      comfy-kitchen's dense INT8 attention
sol_attn, tau T           its sparse attention, T as in ComfyUI's node Model Sparse Attention, 256 extra tokens
KERNEL, P % of the blocks  ours: routing, the means of the blocks that are not read, and quantisation included

error   relative, against attention in float32 over all keys, of QUERIES queries
ratio   seconds of the fastest row of comfy-kitchen that has no larger error, over this one's
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.cases import parse_size
from benchmarks.measure import measure, relative_error
from benchmarks.rows import Row, guarded
from benchmarks.structured import structured
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sdpa import math_reference
from wan_core.ops.attention.sparse.forward import SparseForward
from wan_core.ops.attention.sparse.kernels import KERNELS, block_length
from wan_core.ops.attention.sparse.routing import Rule
from wan_core.ops.attention.tiles import make_tiles

HEADS, QUERIES = 4, 512
TAUS = (0.5, 0.8, 1.0, 1.3, 1.6, 2.0)
KEEPS = (0.5, 0.35, 0.25, 0.18, 0.125, 0.09, 0.06)
EXTRA_TOKENS = 256
THEIRS = "comfy-kitchen at equal error"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def equal_rows(size: str, device: torch.device, runs: int) -> Iterator[Row]:
    width, height, frames = parse_size(size)
    grid = (frames - 1) // 4 + 1, height // 16, width // 16
    cuda = device.type == "cuda"
    dtype, repeats = (torch.bfloat16, 10) if cuda else (torch.float32, 1)
    few = structured(grid, heads=HEADS, dim=128)
    rows = torch.linspace(0, few[0].shape[1] - 1, min(QUERIES, few[0].shape[1])).long()
    exact = math_reference(*(x.to(device) for x in (few[0][:, rows], few[1], few[2])))
    q, k, v = (x.to(device, dtype).repeat(1, 1, repeats, 1) for x in few)
    del few

    def row(name: str, reason: str | None, make: Callable[[], Attend], order: Tensor | None = None) -> Row:
        return guarded(name, size, reason, lambda: timed(make(), (q, k, v), exact, rows.to(device), order, runs))

    found: list[Row] = []
    for name, reason, make in theirs(device, dtype):
        found.append(row(name, reason, make))
        yield found[-1]
    tokens = q.shape[1]
    for kernel in KERNELS.values():
        reason = kernel.why_not(device, dtype, 128)
        if kernel.name == "math" and cuda:
            continue  # the formula, for tests
        tiles = make_tiles(grid, block_length(kernel, tokens), device)
        for keep in KEEPS:
            state = lambda kernel=kernel, tiles=tiles, keep=keep: SparseForward(kernel, [], tiles, [Rule(keep)])  # noqa: E731
            make = lambda state=state: lambda q, k, v: state().attend(AttentionCall(0), q, k, v)  # noqa: E731
            made = row(f"{kernel.name}, {100 * keep:g} % of the blocks", reason, make, tiles.order)
            yield made | at_equal_error(made, found)
            if reason is not None:
                break


def theirs(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, str | None, Callable[[], Attend]]]:
    yield "int8", BACKENDS["int8"].why_not(device, dtype, 128), lambda: BACKENDS["int8"].load()
    reason = sol_why_not(device)
    for tau in TAUS:
        yield f"sol_attn, tau {tau:g}", reason, lambda t=tau: sol_attn(t)


def sol_why_not(device: torch.device) -> str | None:
    try:
        import comfy_kitchen
    except ImportError:
        return "comfy-kitchen is not installed: pip install comfy-kitchen"
    if not hasattr(comfy_kitchen, "sol_attn"):
        return "this comfy-kitchen has no sol_attn: pip install -U comfy-kitchen"
    return (
        None if device.type == "cuda" and comfy_kitchen.sol_attn_is_available(device) else "no kernel for this device"
    )


def sol_attn(tau: float) -> Attend:
    import comfy_kitchen

    attend = comfy_kitchen.sol_attn
    more = {"token_aug": EXTRA_TOKENS} if "token_aug" in inspect.signature(attend).parameters else {}
    return lambda q, k, v: attend(q, k, v, tau=tau, **more)


@torch.no_grad()
def timed(
    attend: Attend, data: tuple[Tensor, Tensor, Tensor], exact: Tensor, rows: Tensor, order: Tensor | None, runs: int
) -> Row:
    """order: of the tokens that `attend` sees; a forward brings them into it once for all layers."""
    q, k, v = data if order is None else (x[:, order] for x in data)
    measured = measure(lambda: lambda: attend(q, k, v), q.device, runs)
    out = measured.output
    if order is not None:
        out = torch.empty_like(out).index_copy_(1, order, out)
    return {
        "seconds": round(measured.median, 6),
        "error": relative_error(out[:, rows, : exact.shape[2]], exact),
        "peak_gib": measured.numbers().get("peak_gib", 0.0),
    }


def at_equal_error(row: Row, others: list[Row]) -> Row:
    as_good = [one["seconds"] for one in others if "seconds" in one and "error" in row and one["error"] <= row["error"]]
    return {"ratio": round(min(as_good) / row["seconds"], 3), "ratio_to": THEIRS} if as_good else {}
