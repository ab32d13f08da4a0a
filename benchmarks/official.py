"""Suite `templates`: ComfyUI's official templates of other models, as they are, with our node, with our sampler.

Transformers of the real width with some layers, random bf16 weights; encoders are replaced by small nodes that give
random tensors of the right shape, and nothing is decoded (`benchmarks/templates`). Steps and clips are the template's,
all solvers are Euler: it takes as long as lcm and unipc, and gives every side the same noise.

seconds   of all samplers of the template; ratio: ComfyUI's own over this row's; error: of the last sampler's latents.
That of our sampler in the S2V template is of other mathematics (docs/families.md), not of arithmetic.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import parse_size
from benchmarks.comfy_server import PATIENCE, Server
from benchmarks.comfyui import Graph, find_checkout, without_page
from benchmarks.measure import relative_error
from benchmarks.options import TEMPLATE_PARTS, check_names
from benchmarks.rows import Row, guarded
from benchmarks.templates.our_sampler import OURS, SAMPLERS, with_our_sampler
from benchmarks.templates.run import Scale, Templates, observed, sampled_with

PLAIN = "native"
WARM_STEPS = 2
LAYERS = 8  # of 40
FP8 = {"precision": "fp8", "attention": "cudnn-fp8"}
ACCELERATE: dict[str, dict[str, Any] | None] = {  # a row of ComfyUI's samplers -> inputs of WanCore Accelerate
    PLAIN: None,
    "accelerated, auto": {"speed": "exact", "attention": "auto"},
    "accelerated, cudnn-fp8": {"speed": "exact", "attention": "cudnn-fp8"},
}
FROM_MODEL: dict[str, dict[str, Any]] = {"ours, bf16": {}, "ours, fp8": FP8}  # a row of ours -> of WanCore from MODEL
SIDES = (*ACCELERATE, *FROM_MODEL)


def official_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the templates in every size, in one server; on a CPU the models are tiny, with two steps. Raises
    OptionError where there is no ComfyUI."""
    check_names("setup", options.setup or (), SIDES, options.suite)
    layers, scratch, cpu = options.layers or LAYERS, options.scratch, device.type == "cpu"
    details |= {"layers": layers}
    with tempfile.TemporaryDirectory(prefix="wancore-templates-", dir=scratch) as base:
        page, folder = without_page(Path(base)), scratch and scratch / "templates"
        folder = folder if folder and folder.is_dir() else None  # ComfyUI's Python has them
        templates = Templates(find_checkout(), Path(base), folder, arguments=page, cpu=cpu, patience=PATIENCE)
        with Server(templates.server, device) as server:
            for part in options.setting or TEMPLATE_PARTS:
                for size in sizes:
                    scale = scale_of(size, None if cpu else layers)
                    yield from rows_of(templates, server, TEMPLATE_PARTS[part], size, scale, options.setup or SIDES)


def scale_of(size: str, layers: int | None) -> Scale:
    """The template's steps and clips in the pixels of `size`, whose frames are those of the driving videos; without
    layers, of tiny models, two steps and clips of so many frames."""
    width, height, frames = parse_size(size)
    pixels = {"width": width, "height": height, "resize_type.width": width, "resize_type.height": height}
    tiny = layers is None
    return Scale({**pixels, **({"length": frames} if tiny else {})}, 2 if tiny else None, frames, layers)


def rows_of(
    templates: Templates, server: Server, template: str, size: str, scale: Scale, sides: tuple[str, ...] | list[str]
) -> Iterator[Row]:
    make = partial(templates.graph, template, scale)
    made = guarded(template, size, None, lambda: {"graph": sampled_with(make(), solver="euler")})
    if "failed" in made:
        yield made
        return
    exact: Row | None = None
    for side in sorted(sides, key=SIDES.index):
        row = guarded(f"{template}: {side}", size, None, partial(sampled, templates, server, side, made["graph"]))
        latents = row.pop("latents", None)
        exact = {**row, "latents": latents} if side == PLAIN and latents is not None else exact
        if latents is not None and exact is not None:
            row |= {"error": relative_error(latents, exact["latents"])}
            row |= {"ratio": round(exact["seconds"] / row["seconds"], 3), "ratio_to": PLAIN}
        yield row


def sampled(templates: Templates, server: Server, side: str, graph: Graph) -> Row:
    """Seconds of all samplers, after a run of few steps with other seeds that is not counted."""
    if side in FROM_MODEL:
        graph = with_our_sampler(graph, FROM_MODEL[side])
    graph = observed(graph, "timed", ACCELERATE.get(side))
    server.run(sampled_with(graph, steps=WARM_STEPS, seed=1))
    row, _ = server.run(sampled_with(graph, seed=2))
    nodes = row.pop("nodes")
    seconds = sum(nodes.get(name, 0.0) for name, one in graph.items() if one["class_type"] in (*SAMPLERS, OURS))
    *_, latents = templates.kept("timed").values()
    return row | {"seconds": round(seconds, 3), "latents": latents.float()}
