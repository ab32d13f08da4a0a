"""Suite `templates`: ComfyUI's official templates of other models, as they are, with our node, with our sampler.

Transformers of the real width with some layers, random bf16 weights; encoders are replaced by small nodes that give
random tensors of the right shape, and nothing is decoded (`benchmarks/templates`). Steps and clips are the template's,
all solvers are Euler: it takes as long as lcm and unipc, and gives every side the same noise.

seconds   of all samplers of the template; ratio: ComfyUI's own over this row's; error: of the last sampler's latents.
That of our sampler in the S2V template is of other mathematics (docs/families.md), not of arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import parse_size
from benchmarks.comfy_graphs import with_defaults
from benchmarks.comfyui import Graph, find_checkout, without_page
from benchmarks.measure import relative_error
from benchmarks.options import TEMPLATE_PARTS
from benchmarks.rows import Row, guarded
from benchmarks.templates.our_sampler import OURS, SAMPLERS, with_our_sampler
from benchmarks.templates.run import Scale, Templates, observed, with_euler, with_steps
from wan_core.config import OptionError
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.quant.schemes import SCHEMES

PLAIN = "native"
HEAD_DIM = 128
WARM_STEPS = 2
LAYERS = 8  # of 40


@dataclass(frozen=True)
class Side:
    """A row. accelerate: inputs of WanCore Accelerate. ours: arguments of `with_our_sampler`. Neither: native."""

    name: str
    accelerate: Mapping[str, Any] | None = None
    ours: Mapping[str, Any] | None = None

    def graph(self, graph: Graph) -> Graph:
        if self.ours is not None:
            return observed(with_our_sampler(graph, **self.ours), "timed")
        return observed(graph, "timed", self.accelerate)

    def why_not(self, device: torch.device) -> str | None:
        """None where it runs on the device; else why not."""
        model = self.accelerate or (self.ours or {}).get("model", {})
        attention, precision = model.get("attention", "auto"), model.get("precision", "checkpoint")
        if (self.ours or {}).get("devices") and torch.cuda.device_count() < 2:
            return "needs two GPUs"
        if attention in BACKENDS and (reason := BACKENDS[attention].why_not(device, torch.bfloat16, HEAD_DIM)):
            return f"{attention}: {reason}"
        if precision in SCHEMES and (reason := SCHEMES[precision].why_not(device)):
            return f"{precision}: {reason}"
        return None


FP8 = {"precision": "fp8", "attention": "cudnn-fp8"}
SIDES = (
    Side(PLAIN),
    Side("accelerated, auto", {"speed": "exact", "attention": "auto"}),
    Side("accelerated, cudnn-fp8", {"speed": "exact", "attention": "cudnn-fp8"}),
    Side("accelerated, cudnn-fp8, speed balanced", {"speed": "balanced", "attention": "cudnn-fp8"}),
    Side("ours, bf16", ours={}),
    Side("ours, fp8", ours={"model": FP8}),
    Side("ours, fp8, speed balanced", ours={"model": FP8, "speed": "balanced"}),
    Side("ours, fp8, 2 GPUs", ours={"model": FP8, "devices": "2"}),
)


def official_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the templates in every size, in one server; on a CPU the models are tiny, with two steps. Raises
    OptionError where there is no ComfyUI."""
    sides, scratch, layers = options.setup or (), options.scratch, options.layers or LAYERS
    if unknown := set(sides) - {side.name for side in SIDES}:
        raise OptionError(f"setup {min(unknown)!r} given; the suite has {', '.join(side.name for side in SIDES)}")
    names = [TEMPLATE_PARTS[part] for part in options.setting or TEMPLATE_PARTS]
    details |= {"layers": layers}
    checkout = find_checkout(options.checkout)
    cpu = device.type == "cpu"
    scale = Scale(None, 2 if cpu else None, 9, None if cpu else layers)
    with tempfile.TemporaryDirectory(prefix="wancore-templates-", dir=scratch) as base:
        templates = Templates(
            checkout,
            Path(base),
            scale,
            templates_of(scratch, names),
            arguments=without_page(Path(base)),
            cpu=cpu,
            patience=400.0,
            **({"environment": {"WANCORE_ALLOW_CPU_WORKERS": "1"}} if cpu else {}),
        )
        try:
            for template in names:
                for size in sizes:
                    yield from rows_of(templates, template, size, sides, device)
        finally:
            templates.stop()


def sized(scale: Scale, size: str) -> Scale:
    """The same in the pixels of `size`; its frames are those of the driving videos, and on a CPU of the clips."""
    width, height, frames = parse_size(size)
    whole = {"width": width, "height": height, "resize_type.width": width, "resize_type.height": height}
    return replace(scale, size={**whole, **({"length": frames} if scale.layers is None else {})}, frames=frames)


def rows_of(
    templates: Templates, template: str, size: str, sides: Sequence[str], device: torch.device
) -> Iterator[Row]:
    scale = sized(templates.scale, size)
    made = guarded(template, size, None, lambda: {"graph": with_euler(templates.graph(template, scale))})
    if "failed" in made:
        yield made
        return
    seconds: float | None = None
    exact: torch.Tensor | None = None
    for side in SIDES:
        if sides and side.name not in sides:
            continue
        row = guarded(
            f"{template}: {side.name}",
            size,
            side.why_not(device),
            lambda s=side: sampled(templates, s.graph(made["graph"])),
        )
        latents = row.pop("latents", None)
        if latents is not None and side.name == PLAIN:
            exact, seconds = latents, row["seconds"]
        if latents is not None and exact is not None and seconds is not None:
            row |= {"error": relative_error(latents, exact)}
            row |= {"ratio": round(seconds / row["seconds"], 3), "ratio_to": PLAIN}
        yield row


def sampled(templates: Templates, graph: Graph) -> Row:
    """Seconds of all samplers, after a run of few steps with other seeds that is not counted."""
    graph = with_defaults(graph, templates.info)
    for given in (reseeded(with_steps(graph, WARM_STEPS), 1), reseeded(graph, 2)):
        run = templates.server.watch(given)
        if not run.ok:
            raise RuntimeError(run.fault)
    seconds, since = 0.0, None
    for event in run.events:
        if event["type"] == "executing":
            seconds += 0.0 if since is None else event["at"] - since
            kind = graph.get(event["data"]["node"] or "", {}).get("class_type")
            since = event["at"] if kind in (*SAMPLERS, OURS) else None
    kept = sorted((templates.base / "output").glob("timed-*.pt"), key=os.path.getmtime)
    latents = torch.load(kept[-1]).float()
    for path in kept:
        path.unlink()
    return {"seconds": round(seconds, 3), "latents": latents}


def reseeded(graph: Graph, seed: int) -> Graph:
    made = deepcopy(graph)
    for one in made.values():
        for name in ("seed", "noise_seed"):
            if isinstance(one["inputs"].get(name), int):
                one["inputs"][name] = seed
    return made


def templates_of(scratch: Path | None, names: Sequence[str] = tuple(TEMPLATE_PARTS.values())) -> Path | None:
    """The folder of templates in `scratch`, as the package has it; None: ComfyUI's Python has them."""
    folder = None if scratch is None else scratch / "templates"
    if folder is None or not folder.is_dir():
        return None
    for name in names:
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return folder
