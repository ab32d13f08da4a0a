"""Suite `rotation`: what a Hadamard rotation does to the error of linears in FP8 and INT8 rows.

error           relative error of a product whose weight and input are both rounded
weight_error    with the input in full precision; `input_error` with the weight in full precision
error_worst     of the linear with the largest error, where there are several

Data: normal numbers; eight input channels 30 times larger than the others (`outliers`), and the same with those columns
of the weight 30 times smaller (`smoothed`: what a norm's weight may hide); the output of a GELU (`gelu`); heavy tails
(`tails`, Student's t of 3 degrees); and every quantised linear of the embedded model with its inputs at all steps of a
video (`embedded`, mean over the linears).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import relative_error
from benchmarks.rows import Row
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.models.wan.linears import quantized_names
from wan_core.ops.kernels.formats import quantize_reference
from wan_core.ops.kernels.integer_weights import quantize_rows, rotate, rotation_of
from wan_core.pipeline.pipeline import Pipeline

ROWS, INPUTS, OUTPUTS = 256, 2560, 512
TOKENS = 512  # of each linear's inputs that are kept
PROMPT = "a red circle moving right on a blue background"
Pair = tuple[Tensor, Tensor]  # inputs [M, K] and a weight [N, K]


def rotation_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Raises OptionError for a model that is not the embedded one: only that has inputs that mean something."""
    if name != "tiny":
        raise OptionError(f"model {name} given; the suite rotation measures the embedded one: use --model tiny")
    cases = {label: [pair] for label, pair in drawn(device).items()} | {"embedded": embedded(device, options.steps)}
    for label, pairs in cases.items():
        details.setdefault("rotation", {})[label] = sorted({rotation_of(w.shape[1]) for _, w in pairs})
        for fmt in ("fp8", "int8"):
            for rotated in (False, True):
                yield {
                    "name": f"{label}: {fmt}{', rotated' * rotated}",
                    "size": sizes[0],
                    **errors(pairs, fmt, rotated),
                }


def drawn(device: torch.device) -> dict[str, Pair]:
    generator = torch.Generator().manual_seed(0)
    x, t = (torch.randn(ROWS, INPUTS, generator=generator).to(device) for _ in range(2))
    w = (torch.randn(OUTPUTS, INPUTS, generator=generator) * INPUTS**-0.5).to(device)
    large = torch.ones(INPUTS, device=device)
    large[:: INPUTS // 8] = 30
    chi = torch.stack([torch.randn(ROWS, INPUTS, generator=generator).to(device) for _ in range(3)]).square().mean(0)
    return {
        "normal": (x, w),
        "outliers": (x * large, w),
        "smoothed": (x * large, w / large),
        "gelu": (F.gelu(2 * x), w),
        "tails": (t / chi.sqrt(), w),
    }


@torch.no_grad()
def embedded(device: torch.device, steps: int | None) -> list[Pair]:
    """Every quantised linear of both experts, with some of the tokens that it gets in every step of a video."""
    pipe = Pipeline.load(LoadOptions(model="tiny", device=str(device), precision="fp32"))
    seen: dict[tuple[str, str], list[Tensor]] = {}
    weights: dict[tuple[str, str], Tensor] = {}
    hooks = []
    for expert in ("high", "low"):
        model = pipe.models.expert(expert)
        for name in sorted(quantized_names(model.config)):
            linear, key = model.get_submodule(name), (expert, name)
            weights[key] = linear.get_parameter("weight")
            keep = seen.setdefault(key, []).append
            hooks.append(
                linear.register_forward_pre_hook(lambda _, given, keep=keep: keep(given[0].flatten(0, -2).clone()))
            )
    pipe.generate(Request(prompt=PROMPT, steps=steps or 8))
    for hook in hooks:
        hook.remove()
    pairs = []
    for key, several in seen.items():
        rows = torch.cat(several).float()
        pairs.append((rows[:: max(1, len(rows) // TOKENS)], weights[key].float()))
    return pairs


def errors(pairs: list[Pair], fmt: str, rotated: bool) -> Row:
    found = []
    for x, w in pairs:
        exact = x @ w.t()
        size = rotation_of(w.shape[1]) if rotated else 0
        x, w = rotate(x, size), rotate(w, size)
        rounded_x, rounded_w = rounded(x, fmt), rounded(w, fmt)
        products = (rounded_x @ rounded_w.t(), x @ rounded_w.t(), rounded_x @ w.t())
        found.append([relative_error(product, exact) for product in products])
    means = torch.tensor(found).mean(0).tolist()
    row = {key: round(mean, 5) for key, mean in zip(("error", "weight_error", "input_error"), means, strict=True)}
    return row if len(found) == 1 else row | {"error_worst": max(each[0] for each in found), "linears": len(found)}


def rounded(x: Tensor, fmt: str) -> Tensor:
    """x [..., K] as numbers of the format with a scale for every row."""
    if fmt == "fp8":
        return quantize_reference(x, "row").dequantize()
    data, scale = quantize_rows(x)
    return data.float() * scale
