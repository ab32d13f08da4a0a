"""Part `templates` of suite `native`: variants of Wan by ComfyUI's official templates, as they are and with our nodes.

Transformers of the real width with some layers, random bf16 weights; encoders are replaced by small nodes that give
random tensors of the right shape, and nothing is decoded (`tools/templates`). Steps and clips are the template's.

seconds   of all samplers of the template; ratio: ComfyUI's own over this row's; error: of the last sampler's latents,
          where ComfyUI's sampler made them
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.comfyui import Graph, without_page
from benchmarks.measure import relative_error
from benchmarks.rows import Row, guarded
from tools.templates.run import SAMPLERS, Scale, Templates, observed
from tools.templates.sampled import with_own_samplers

TEMPLATES = ("video_wan_animate2", "video_wan2_2_14B_s2v", "video_wan_vace_14B_v2v")
PLAIN = "native"
FP8 = {"attention": "cudnn-fp8", "sparse": "off"}
SIDES: dict[str, Mapping[str, Any] | None] = {
    PLAIN: None,
    "accelerated, auto": {"attention": "auto", "sparse": "off"},
    "accelerated, cudnn-fp8": FP8,
    "accelerated, cudnn-fp8, sparse balanced": {**FP8, "sparse": "balanced"},
}
# WanCore Sampler in the place of ComfyUI's, with the template's solver in the reference's form.
OWN: dict[str, Mapping[str, Any]] = {
    "sampler, auto": {},
    "sampler, fp8, cudnn-fp8": {"precision": "fp8", "attention": "cudnn-fp8"},
    "sampler, fp8, cudnn-fp8, sparse balanced": {"precision": "fp8", "attention": "cudnn-fp8", "sparse": "balanced"},
    "sampler, fp8, cudnn-fp8, sparse fast": {"precision": "fp8", "attention": "cudnn-fp8", "sparse": "fast"},
}
SAMPLED = ("video_wan2_2_14B_s2v", "video_wan_vace_14B_v2v")


def template_rows(
    checkout: Path,
    folder: Path | None,
    size: tuple[int, int, int],
    layers: int | None,
    device: torch.device,
    chosen: Sequence[str] = TEMPLATES,
) -> Iterator[Row]:
    """Rows of the chosen templates. folder: of the templates, where ComfyUI's Python has none. layers: None: tiny
    models."""
    width, height, frames = size
    whole = {"width": width, "height": height, "resize_type.width": width, "resize_type.height": height}
    cpu = device.type == "cpu"
    scale = Scale({**whole, **({"length": frames} if cpu else {})}, 2 if cpu else None, frames, layers)
    with tempfile.TemporaryDirectory(prefix="wancore-templates-") as base:
        templates = Templates(
            checkout, Path(base), scale, folder, arguments=without_page(Path(base)), cpu=cpu, patience=400.0
        )
        try:
            for template in chosen:
                yield from rows_of(templates, template, f"{width}x{height}x{frames}")
        finally:
            templates.stop()


def rows_of(templates: Templates, template: str, size: str) -> Iterator[Row]:
    made = guarded(template, size, None, lambda: {"graph": templates.graph(template)})
    if "failed" in made:
        yield made
        return
    seconds: float | None = None
    exact: torch.Tensor | None = None
    sides: dict[str, Callable[[Graph], Graph]]
    sides = {side: partial(observed, run="timed", accelerate=inputs) for side, inputs in SIDES.items()}
    if template in SAMPLED:
        own = {side: partial(with_own_samplers, solver="unipc", **given) for side, given in OWN.items()}
        sides |= {side: lambda graph, make=make: make(observed(graph, "timed")) for side, make in own.items()}
    for side, make in sides.items():
        row = guarded(f"{template}: {side}", size, None, lambda m=make: sampled(templates, made["graph"], m))
        latents = row.pop("latents", None)
        if latents is not None:
            exact = latents if exact is None else exact
            if side in SIDES:
                row["error"] = relative_error(latents, exact)
            seconds = row["seconds"] if seconds is None else seconds
            row |= {"ratio": round(seconds / row["seconds"], 3), "ratio_to": PLAIN}
        yield row


def sampled(templates: Templates, graph: Graph, make: Callable[[Graph], Graph]) -> Row:
    """Seconds of all samplers, after a run with other seeds that is not counted."""
    for seed in (1, 2):
        run = templates.server.watch(make(reseeded(graph, seed)))
        if not run.ok:
            said = next((data for kind, data in run.status["messages"] if kind == "execution_error"), {})
            raise RuntimeError(f"{said.get('node_id')}: {str(said.get('exception_message', 'interrupted'))[:500]}")
    seconds, since = 0.0, None
    for event in run.events:
        if event["type"] == "executing":
            seconds += 0.0 if since is None else event["at"] - since
            kind = graph.get(event["data"]["node"] or "", {}).get("class_type")
            since = event["at"] if kind in SAMPLERS else None
    kept = sorted((templates.base / "output").glob("timed-*.pt"))
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


def templates_of(scratch: Path | None) -> Path | None:
    """The folder of templates in `scratch`, as the package has it; None: ComfyUI's Python has them."""
    folder = None if scratch is None else scratch / "templates"
    if folder is None or not folder.is_dir():
        return None
    for name in TEMPLATES:
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return folder
