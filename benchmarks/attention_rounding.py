"""The part `rounding` of the suite `attention`: which rounding makes the error of 8-bit attention, emulated in float32.

qk            error of the output where q and k alone are rounded to FP8 with one scale, K's mean removed
qk_rotated    the same after a Hadamard rotation of every head's channels
v, p          values, or probabilities, alone in FP8
fp8, fp8_rotated   all of these, as an FP8 kernel computes
int8_fp8      q and k in INT8 with a scale for each token, v and probabilities in FP8; `int8_fp8_rotated`
channels      how far channels stick out: of q and k after RoPE, the largest root mean square of a channel over the
              median, mean over heads; `channels_worst` the largest of a head

Drawn data are those of `kernels`. A model's own q, k and v: of every layer in every step of a video (`--steps`, 8), the
errors' mean, and the worst layer's `fp8` (`worst`) and `fp8_rotated` (`worst_rotated`).

Legend: B batch, L tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from benchmarks.cases import parse_size
from benchmarks.generation import PROMPT
from benchmarks.measure import make_room, relative_error
from benchmarks.options import CPU_SIZE
from benchmarks.rows import Row
from wan_core.config import LoadOptions, Request
from wan_core.execution.optimize import set_attention
from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.protocol import SINGLE, Attention, AttentionCall
from wan_core.ops.attention.sdpa import math_reference
from wan_core.ops.kernels.formats import FP8, FP8_MAX
from wan_core.ops.kernels.integer_weights import quantize_rows
from wan_core.ops.kernels.reference import hadamard_heads
from wan_core.pipeline.pipeline import Pipeline

QUERIES, HEADS = 512, 4  # of which errors are measured
Data = tuple[Tensor, Tensor, Tensor]


def fp8(x: Tensor) -> Tensor:
    """Under one scale."""
    scale = x.abs().amax().clamp(min=1e-12) / FP8_MAX
    return (x / scale).to(FP8).float() * scale


def int8(x: Tensor) -> Tensor:
    """With a scale for each token of each head."""
    data, scale = quantize_rows(x)
    return data.float() * scale


def attend(q: Tensor, k: Tensor, v: Tensor, *, round_p: bool = False) -> Tensor:
    """[B, L, H, D] float32. round_p: probabilities, the largest of a row 1, to FP8 before they meet v."""
    scores = torch.einsum("blhd,bshd->bhls", q, k) * q.shape[-1] ** -0.5
    shares = (scores - scores.amax(-1, keepdim=True)).exp_()
    total = shares.sum(-1, keepdim=True)
    if round_p:
        shares = (shares * FP8_MAX).to(FP8).float() / FP8_MAX
    return torch.einsum("bhls,bshd->blhd", shares / total, v)


@torch.no_grad()
def rounding(data: Data) -> dict[str, float]:
    """The columns for q, k and v [B, L, H, D]."""
    q, k, v = (x.float() for x in (data[0][:, :QUERIES], *data[1:]))
    exact = math_reference(q, k, v)
    k = k - key_mean(k)
    turned = hadamard_heads(q), hadamard_heads(k)
    found = {
        "qk": attend(fp8(q), fp8(k), v),
        "qk_rotated": attend(*map(fp8, turned), v),
        "v": attend(q, k, fp8(v)),
        "p": attend(q, k, v, round_p=True),
        "fp8": attend(fp8(q), fp8(k), fp8(v), round_p=True),
        "fp8_rotated": attend(*map(fp8, turned), fp8(v), round_p=True),
        "int8_fp8": attend(int8(q), int8(k), fp8(v), round_p=True),
        "int8_fp8_rotated": attend(*map(int8, turned), fp8(v), round_p=True),
    }
    return {name: relative_error(out, exact) for name, out in found.items()} | spread(q, k)


def spread(*given: Tensor) -> dict[str, float]:
    sizes = torch.stack([x.square().mean((0, 1)).sqrt() for x in given])  # [2, H, D]
    ratio = sizes.amax(-1) / sizes.median(-1).values.clamp(min=1e-12)
    return {"channels": round(float(ratio.mean()), 3), "channels_worst": round(float(ratio.max()), 3)}


class Watched(Attention):
    """`inner`, and every call is shown to `see`: (layer, some queries of some heads with all their keys)."""

    def __init__(self, inner: Attention, see: Callable[[int, Data], None]) -> None:
        self.inner, self.see = inner, see

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> Tensor:
        self.see(call.layer, (q[:1, :: max(1, q.shape[1] // QUERIES), :HEADS], k[:1, :, :HEADS], v[:1, :, :HEADS]))
        return self.inner(q, k, v, call)


def watch(name: str, size: str, device: torch.device, steps: int, see: Callable[[str, int, Data], None]) -> None:
    """Show q, k and v of every layer in every step of a video of the model called `name` to `see`, with the expert."""
    width, height, frames = parse_size(size)
    request = Request(prompt=PROMPT, width=width, height=height, frames=frames, steps=steps)
    pipe = Pipeline.load(LoadOptions(model=name, device=str(device)), request=request)
    for expert in ("high", "low"):
        model = pipe.models.expert(expert)
        set_attention(model, Watched(model.blocks[0].self_attn.attend, partial(see, expert)))
    pipe.generate(request)


def own_data(device: torch.device) -> list[Data]:
    """q, k and v of the embedded model, of some layers and steps."""
    found: list[Data] = []
    watch("tiny", CPU_SIZE, device, 4, lambda expert, layer, data: found.append(data))
    return found[::7]


def recorded_rows(name: str, size: str, device: torch.device, steps: int | None) -> Iterator[Row]:
    """A row for each expert of the model called `name` that runs in so many steps."""
    found: dict[str, list[tuple[int, dict[str, float]]]] = {}

    def see(expert: str, layer: int, data: Data) -> None:
        found.setdefault(expert, []).append((layer, rounding(data)))

    watch(name, size, device, steps or 8, see)
    for expert, columns in found.items():
        yield {"name": f"{Path(name).name}, {expert}", "size": size, **summary(columns)}
    make_room(device)


def summary(found: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    names = found[0][1]
    row = {name: round(mean(columns[name] for _, columns in found), 5) for name in names}
    row["channels_worst"] = max(columns["channels_worst"] for _, columns in found)
    layers = {layer for layer, _ in found}
    for label, column in (("worst", "fp8"), ("worst_rotated", "fp8_rotated")):
        of_layer = (mean(columns[column] for layer, columns in found if layer == one) for one in layers)
        row[label] = round(max(of_layer), 5)
    return row
