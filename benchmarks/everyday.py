"""Suite `everyday`: ComfyUI's own image-to-video template, from the click to the file, with its nodes and with ours.

Needs a checkout of ComfyUI (COMFYUI_PATH; its Python: COMFYUI_PYTHON or this one) and about 40 GB for files with random
weights, 70 with `t2v` (`--scratch`, /dev/shm keeps them in memory; files that are there are used again). Everything
runs in a real ComfyUI server over its API. `--setting` takes parts of it:

on       the template's switch on: a LoRA for each expert, four steps, no guidance
fresh    the same with a new prompt, of each side's own, and a new picture in each counted run
t2v      the text-to-video template, with its switch on
off      the switch off: 20 steps with guidance 3.5, or `--steps`
cold     a fresh server for each side and run: from POST, as soon as it answers, to the file

All sides of a part take turns, in one server, `--runs` rounds (1 of `off`, 3 of the others). In each round a side makes
a video of two steps that is not counted, which loads its models and kernels, and one with a new seed that is. A row is
written after every round, its median so far.

Rows (`--setup`), by name: "native ..." are ComfyUI's own nodes, "ours ..." this pack's. "auto" changes numbers only by
rounding, "cudnn-fp8" attends in FP8, and so do the words of `speed` (careful, balanced, fast). With `--gpus N` there
are sides for N GPUs: ours with WanCore Launcher, the template as the page's command *run this workflow on all GPUs*
changes it, and ComfyUI's own MultiGPU CFG Split (0.33 or newer), which gives a guidance branch to each GPU.
With `--wide` the experts' files ask for products in 16 bits, as some published ones do.
On a CPU everything is small (`comfy_small`): what runs there is the code, not the work.

Rows of `cold` also have the seconds after POST of every progress of the samplers (progress).

seconds   from POST to the end of the last node, the median; spread: the slowest less the fastest; times: all of them
nodes     of the run next to the median: seconds by loaders, text, image, samplers, decode, save
peak_gib  the most device memory in use during the counted runs, by all processes
error     relative difference of the latents of the first counted video from those of the row `error_to`, which has the
          same seed; not of `fresh`
said      what caches left out in that run, and what computed a native model, as the server's log says it
ratio     seconds of the fastest native row on one GPU over this one's; ratio_to_native_gpus: of the fastest on as many
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import parse_size
from benchmarks.comfy_files import IMAGES, write_files
from benchmarks.comfy_graphs import Job, accelerated_graph, all_gpus_graph, native_graph, our_graph, with_latents
from benchmarks.comfy_server import Server, saved_latents, server_files, serving
from benchmarks.comfyui import Graph
from benchmarks.measure import relative_error
from benchmarks.options import EVERYDAY_PARTS, check_names
from benchmarks.rows import Row, guarded
from wan_core.config import SPEEDS


@dataclass(frozen=True)
class Side:
    """A row: who makes the video, and how. native: with nothing of ours. gpus: that it uses."""

    name: str
    graph: Callable[[Job], Graph]
    native: bool = False
    gpus: int = 1


KITCHEN = "comfy kitchen attention"
# ComfyUI's own node "Model Sparse Attention", as it is when it is added to a graph
SOL = {"selection": "sol-attn", "selection.tau": 1.3, "start_percent": 0.2, "end_percent": 1.0}
SPARSE, CACHE = ("BlockSparseAttention", SOL), ("EasyCache", {})
FP8, WORDS = "cudnn-fp8", SPEEDS[1:]
NATIVE = Side("native", native_graph, native=True)
SIDES = (
    NATIVE,
    Side(f"native, {KITCHEN}", partial(native_graph, attention=KITCHEN), native=True),
    Side("native, Model Sparse Attention", partial(native_graph, attention=KITCHEN, patch=SPARSE), native=True),
    Side("native, EasyCache", partial(native_graph, attention=KITCHEN, patch=CACHE), native=True),
    *(Side(f"native, accelerated, {kind}", partial(accelerated_graph, attention=kind)) for kind in ("auto", FP8)),
    *(Side(f"native, accelerated, {word}", partial(accelerated_graph, attention="auto", speed=word)) for word in WORDS),
    *(Side(f"ours, {kind}", partial(our_graph, attention=kind)) for kind in ("auto", FP8)),
    *(Side(f"ours, {word}", partial(our_graph, speed=word)) for word in WORDS),
)
PEER = "the fastest native row"


def sides_for(gpus: int, device: torch.device) -> tuple[Side, ...]:
    """All sides of a machine with so many GPUs."""
    if gpus == 1:
        return SIDES
    ours = partial(our_graph, attention=FP8, devices=",".join(["cpu"] * gpus) if device.type == "cpu" else str(gpus))
    several = (
        Side(f"native, {KITCHEN}", partial(native_graph, attention=KITCHEN, gpus=gpus), native=True),
        Side(f"ours, {FP8}", ours),
        Side("ours, fast", partial(ours, speed="fast")),
        Side("native, on all GPUs", partial(all_gpus_graph, devices=ours.keywords["devices"])),
    )
    return (*SIDES, *(replace(side, name=f"{side.name}, {gpus} GPUs", gpus=gpus) for side in several))


def everyday_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the suite. Raises OptionError where there is no ComfyUI."""
    sides = {side.name: side for side in sides_for(options.gpus or 1, device)}
    check_names("setup", options.setup or (), tuple(sides), options.suite)
    details |= {"layers": options.layers, "gpus": options.gpus or 1}
    with server_files(options.scratch) as base:
        for size in sizes:
            width, height, frames = parse_size(size)
            job = Job(width=width, height=height, frames=frames, layers=options.layers, wide=options.wide)
            for part in options.setting or EVERYDAY_PARTS:
                job = replace(job, task="t2v" if part == "t2v" else "i2v")
                write_files(base / "models", device, job.task, job.layers, job.wide)
                chosen = [sides[name] for name in options.setup or sides]
                yield from part_rows(part, base, device, chosen, job, options)


def part_rows(
    part: str, base: Path, device: torch.device, sides: Sequence[Side], job: Job, options: argparse.Namespace
) -> Iterator[Row]:
    """The rounds of one part, in one server but for `cold`."""
    if part == "off":
        job = replace(job, four_steps=False, steps=options.steps)
    rounds = [replace(job, seed=seed) for seed in range(1, (options.runs or (1 if part == "off" else 3)) + 1)]
    if part == "cold":
        yield from in_turns(EVERYDAY_PARTS[part], sides, rounds, partial(cold, base, device))
        return
    with serving(base, device) as server:
        turn = partial(one_turn, server, job, None if part == "fresh" else {})
        yield from in_turns(EVERYDAY_PARTS[part], sides, rounds, turn)


def in_turns(
    label: str, sides: Sequence[Side], rounds: Sequence[Job], make: Callable[[Side, Job], Row]
) -> Iterator[Row]:
    """In each round every side makes the job, so that what changes meanwhile changes all of them. A row of each side
    after every round, the median so far. Native sides come first, since the others are compared with them."""
    made: dict[Side, list[Row]] = {side: [] for side in sides}
    medians: dict[Side, Row] = {}
    for one in rounds:
        for side in sorted(sides, key=lambda side: (side.gpus, not side.native, side.name != NATIVE.name)):
            rows = made[side]
            if rows and "seconds" not in rows[-1]:
                continue
            rows.append(guarded(side.name, one.size, None, partial(make, side, one)))
            medians[side] = middle_row(rows) if "seconds" in rows[-1] else rows[-1]
            yield medians[side] | ratios(side, medians) | {"name": f"{label}: {side.name}", "gpus": side.gpus}


def one_turn(server: Server, job: Job, latents: dict[str, torch.Tensor] | None, side: Side, one: Job) -> Row:
    """The video `one` after one of `job` with two steps that is not counted: ComfyUI keeps loaded models only for the
    prompt that comes next, and the side before had its own. latents: of the first video of each side; None: nothing is
    compared, prompt and picture are new. The prompt is the side's own: ComfyUI keeps what another made of the text."""
    server.run(side.graph(replace(job, seed=1000 + one.seed, steps=2)))
    if latents is None:
        prompt, picture = f"{job.prompt} Take {one.seed} by {side.name}.", IMAGES[1 + one.seed % (len(IMAGES) - 1)]
        return server.run(side.graph(replace(one, prompt=prompt, image=picture)))[0]
    if side.name in latents:
        return server.run(side.graph(one))[0]
    row, run = server.run(with_latents(side.graph(one)))
    latents[side.name] = saved_latents(server, run)
    reference = next(iter(latents))
    return row | {"error": relative_error(latents[side.name], latents[reference]), "error_to": reference}


def cold(base: Path, device: torch.device, side: Side, one: Job) -> Row:
    with serving(base, device) as server:
        row, run = server.run(side.graph(one))
    steps = [event["at"] - run.begin for event in run.events if event["type"] == "progress"]
    return row | {"progress": [round(at, 3) for at in steps]}


def middle_row(rows: list[Row]) -> Row:
    """The row next to the median, with the median, the range and all times, and what is of all runs."""
    times = [row["seconds"] for row in rows]
    median = statistics.median(times)
    row = min(rows, key=lambda row: abs(row["seconds"] - median))
    kept = {key: rows[0][key] for key in ("error", "error_to") if key in rows[0]}
    peaks = [row["peak_gib"] for row in rows if "peak_gib" in row]
    kept |= {"peak_gib": max(peaks)} if peaks else {}
    spread = round(max(times) - min(times), 3)
    return row | kept | {"seconds": round(median, 3), "spread": spread, "runs": len(rows), "times": times}


def ratios(side: Side, medians: Mapping[Side, Row]) -> Row:
    """To the fastest native row of one GPU, and of as many GPUs as `side` uses."""
    row = medians[side]

    def ratio(gpus: int) -> float | None:
        measured = {peer: one["seconds"] for peer, one in medians.items() if "seconds" in one}
        peers = [seconds for peer, seconds in measured.items() if peer.native and peer.gpus == gpus]
        return round(min(peers) / row["seconds"], 3) if peers and "seconds" in row else None

    one, several = ratio(1), ratio(side.gpus) if side.gpus > 1 else None
    first = {} if one is None else {"ratio": one, "ratio_to": PEER}
    return first if several is None else first | {"ratio_to_native_gpus": several}
