"""Suite `native`: ComfyUI's own models and samplers as they are, and with our node for native models behind the loader.

Everything runs in one real ComfyUI server, as in suite `everyday`: text-to-video with the two experts of A14B in FP8,
8 of 40 blocks (`--layers`), and only latents are saved. `--setting` takes parts of it:

steps    eight steps without guidance, four by each expert: sampler seconds of every side, in turns, the median of
         `--runs` (2) with new seeds after two steps that are not counted; `error` of final latents against native
guided   40 steps with guidance 3.5. The native side runs 4 of them (`--steps`), and its time is scaled; the accelerated
         sides run all, with FP8, sparse attention and step caching
templates  Animate-2, S2V and VACE by ComfyUI's official templates: see `native_templates`. The templates are those of
         ComfyUI's Python, or in the folder `templates` of --scratch
animate2, s2v, vace   one of these templates

seconds   of the two samplers; ratio: seconds of the native side over this one's
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import parse_size
from benchmarks.comfy_files import write_files
from benchmarks.comfy_graphs import Job, accelerated_graph
from benchmarks.comfy_server import Server, saved_latents, server_files
from benchmarks.everyday import NATIVE, NATIVE_KITCHEN, Side
from benchmarks.measure import relative_error
from benchmarks.native_templates import SIDES as TEMPLATE_SIDES
from benchmarks.native_templates import template_rows
from benchmarks.options import NATIVE_PARTS, TEMPLATE_PARTS
from benchmarks.rows import Row, guarded
from wan_core.config import OptionError

LAYERS = 8
SIDES = (
    NATIVE,
    NATIVE_KITCHEN,
    Side("accelerated, auto", lambda job: accelerated_graph(job, "auto")),
    Side("accelerated, int8", lambda job: accelerated_graph(job, "int8")),
    Side("accelerated, cudnn-fp8", lambda job: accelerated_graph(job, "cudnn-fp8")),
    *(
        Side(
            f"accelerated, cudnn-fp8, sparse {preset}",
            lambda job, p=preset: accelerated_graph(job, "cudnn-fp8", {"sparse": p}),
        )
        for preset in ("balanced", "fast")
    ),
)


def native_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the suite. Raises OptionError where there is no ComfyUI."""
    layers = options.layers or LAYERS
    wanted = options.setting or NATIVE_PARTS
    known = [side.name for side in (*SIDES, *TEMPLATE_SIDES)]
    if unknown := set(options.setup or ()) - set(known):
        raise OptionError(f"setup {min(unknown)!r} given; the suite has {', '.join(dict.fromkeys(known))}")
    details |= {"layers": layers}
    with server_files(options.scratch, options.checkout) as (checkout, base):
        for size in sizes if set(wanted) & set(PARTS) else ():
            width, height, frames = parse_size(size)
            job = Job("t2v", width, height, frames, four_steps=False, layers=layers, denoise_only=True)
            write_files(base / "models", device, job.task, job.layers)
            with Server(checkout, base, device) as server:
                for part in wanted:
                    if part in PARTS:
                        yield from PARTS[part](server, job, options)
        names = [name for part, name in TEMPLATE_PARTS.items() if {part, "templates"} & set(wanted)]
        if names:
            yield from template_rows(checkout, options.scratch, names, options.setup or (), sizes, layers, device)


def step_rows(server: Server, job: Job, options: argparse.Namespace) -> Iterator[Row]:
    sides = [side for side in SIDES if not options.setup or side.name in options.setup]
    jobs = [replace(job, steps=8, cfg=1.0, seed=seed) for seed in range(1, 1 + (options.runs or 2))]
    jobs = [replace(jobs[0], steps=2), *jobs]
    seconds: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, float] = {}
    failed: dict[str, Row] = {}
    for job in jobs:
        exact: torch.Tensor | None = None
        for side in sides:
            if side.name in failed:
                continue
            row = guarded(side.name, job.size, None, lambda s=side, j=job: sampled(server, s, j))
            if "failed" in row:
                failed[side.name] = row
                continue
            latents = row.pop("latents")
            exact = latents if exact is None else exact
            errors[side.name] = relative_error(latents, exact)
            seconds[side.name].append(row["seconds"])
    for side in sides:
        row = failed.get(side.name) or measured(side, job, seconds, errors)
        yield row | {"name": f"eight steps: {side.name}"}


def measured(side: Side, job: Job, seconds: dict[str, list[float]], errors: dict[str, float]) -> Row:
    timed = seconds[side.name][1:]
    median = statistics.median(timed)
    row: Row = {"name": side.name, "size": job.size, "seconds": median, "spread": round(max(timed) - min(timed), 3)}
    row["error"] = errors[side.name]
    if peer := seconds.get(NATIVE.name):
        row |= {"ratio": round(statistics.median(peer[1:]) / median, 3), "ratio_to": NATIVE.name}
    return row


def sampled(server: Server, side: Side, job: Job) -> Row:
    row, run = server.run(side.graph(job))
    return {"seconds": row["nodes"]["samplers"], "latents": saved_latents(server, run)}


def guided_rows(server: Server, job: Job, options: argparse.Namespace) -> Iterator[Row]:
    whole = replace(job, steps=40)
    fewer = replace(job, steps=options.steps or 4)
    native = guarded("native", job.size, None, lambda: sampled(server, NATIVE, fewer))
    native.pop("latents", None)
    if "seconds" in native:
        native |= {
            "seconds": round(native["seconds"] * whole.total_steps / fewer.total_steps, 3),
            "steps_measured": fewer.total_steps,
        }
    yield native | {"name": "40 guided steps: native"}
    for sparse, cache in (("balanced", "balanced"), ("fast", "fast")):
        presets = {"cache": cache, "sparse": sparse}
        side = Side("", lambda job, p=presets: accelerated_graph(job, "cudnn-fp8", p))
        row = guarded("", job.size, None, lambda s=side: sampled(server, s, whole))
        row.pop("latents", None)
        if "seconds" in row and "seconds" in native:
            row |= {"ratio": round(native["seconds"] / row["seconds"], 3), "ratio_to": "native"}
        yield row | {"name": f"40 guided steps: accelerated, cudnn-fp8, cache and sparse {cache}"}


PARTS = {"steps": step_rows, "guided": guided_rows}
