"""Suite `everyday`: ComfyUI's own image-to-video template, from the click to the file, with its nodes and with ours.

Needs a checkout of ComfyUI (COMFYUI_PATH; its Python: COMFYUI_PYTHON or this one) and about 40 GB for files with random
weights (`--scratch`, /dev/shm keeps them in memory; files that are there are used again). Everything runs in a real
ComfyUI server over its API. `--setting` takes parts of it:

on       the template's switch on: a LoRA for each expert, four steps, no guidance
fresh    the same with a new prompt, of each side's own, and a new picture in each counted run
off      the switch off: 20 steps with guidance 3.5. ComfyUI's own nodes run only `--steps` (4) of them, and the time of
         their samplers is scaled; ours run all. `--steps 20`: all run all
cold     a fresh server for each side and run: from POST, as soon as it answers, to the file

All sides of a part take turns in one server, `--runs` rounds (3 of `on` and `fresh`, 1 of the others). In each round a
side makes a video of two steps that is not counted, which loads its models and kernels, and one with a new seed that
is. A row is written after every round, its median so far.

With `--gpus N` (default: all that are there) `on`, `fresh` and `off` also have sides for N GPUs: ours with WanCore
Launcher, the template as the page's command *run this workflow on all GPUs* changes it, and, where there is guidance,
ComfyUI's own MultiGPU CFG Split (0.33 or newer), which gives a guidance branch to each GPU. `--gpus 1` leaves them out.

Rows, by name: "native ..." are ComfyUI's own nodes, "ours ..." this pack's. "auto" changes numbers only by rounding,
"cudnn-fp8" attends in FP8, and so do the words of `speed` (careful, balanced, fast).
On a CPU everything is small (`comfy_small`): what runs there is the code, not the work.

Rows of `cold` also have the seconds after POST of every progress of the samplers (progress).

seconds   from POST to the end of the prompt, the median; spread: the slowest less the fastest; times: all of them
nodes     of the run next to the median: seconds by loaders, text, image, samplers, decode, save
peak_gib  the most device memory in use during the counted runs, by all processes
error     relative difference of the latents of the first counted video from those of the row `error_to`, which has the
          same seed; not where the native side runs fewer steps, nor of `fresh`
said      what caches did in that run, as the server's log says it
ratio     seconds of the fastest native row on one GPU over this one's; ratio_to_native_gpus: of the fastest on as many
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import parse_size
from benchmarks.comfy_files import IMAGES, write_files
from benchmarks.comfy_graphs import Job, accelerated_graph, all_gpus_graph, native_graph, our_graph, with_latents
from benchmarks.comfy_server import Server, saved_latents, server_files
from benchmarks.comfyui import Graph
from benchmarks.measure import relative_error
from benchmarks.options import EVERYDAY_PARTS
from benchmarks.rows import Row, guarded
from wan_core.config import EXACT, SPEEDS, OptionError


@dataclass(frozen=True)
class Side:
    """A row: who makes the video, and how. native: with nothing of ours. gpus: that it uses."""

    name: str
    graph: Callable[[Job], Graph]
    native: bool = False
    gpus: int = 1
    node: str | None = None  # of ComfyUI, which older ones lack

    def why_not(self, kinds: Mapping[str, Any], device: torch.device) -> str | None:
        """None where a server with the nodes `kinds` runs it; else why not."""
        if self.node is not None and self.node not in kinds:
            return f"this ComfyUI has no node {self.node}: use a newer one"
        attention = kinds.get("ModelAttentionBackend", {"input": {"required": {"attention": [[]]}}})
        choices = str(attention["input"]["required"]["attention"])
        if device.type == "cuda" and KITCHEN in self.name and KITCHEN not in choices:
            return f"this ComfyUI has no {KITCHEN}: its comfy-kitchen is missing or too old"
        return None


KITCHEN = "comfy kitchen attention"
# ComfyUI's own node "Model Sparse Attention", as it is when it is added to a graph
SOL = {"selection": "sol-attn", "selection.tau": 1.3, "start_percent": 0.2, "end_percent": 1.0}
NATIVE = Side("native", native_graph, native=True)
NATIVE_KITCHEN = Side("native, comfy kitchen attention", lambda job: native_graph(job, attention=KITCHEN), native=True)
NATIVE_SPARSE = Side(
    "native, Model Sparse Attention",
    lambda job: native_graph(job, KITCHEN, patch=("BlockSparseAttention", SOL)),
    native=True,
    node="BlockSparseAttention",
)
NATIVE_CACHE = Side(
    "native, EasyCache", lambda job: native_graph(job, KITCHEN, patch=("EasyCache", {})), native=True, node="EasyCache"
)
OURS = Side("ours, auto", our_graph)
OURS_FP8 = Side("ours, cudnn-fp8", lambda job: our_graph(job, "cudnn-fp8"))
WORDS = tuple(Side(f"ours, {word}", lambda job, word=word: our_graph(job, speed=word)) for word in SPEEDS[1:])
ACCELERATED = (
    Side("native, accelerated, auto", lambda job: accelerated_graph(job, "auto")),
    Side("native, accelerated, cudnn-fp8", lambda job: accelerated_graph(job, "cudnn-fp8")),
    *(
        Side(f"native, accelerated, {word}", lambda job, word=word: accelerated_graph(job, "auto", word))
        for word in SPEEDS[1:]
    ),
)
SIDES = (NATIVE, NATIVE_KITCHEN, NATIVE_SPARSE, OURS, OURS_FP8, *WORDS)
OFF_SIDES = (*SIDES, NATIVE_CACHE)


def gpu_count(gpus: int | None, device: torch.device) -> int:
    """How many GPUs the sides for several have; 1: no such sides. Raises OptionError for GPUs that are not there."""
    if gpus is not None and gpus < 1:
        raise OptionError(f"{gpus} GPUs given to the suite everyday; give 1 or more")
    if device.type == "cpu":
        return gpus or 1
    there = torch.cuda.device_count()
    if (gpus or 1) > there:
        raise OptionError(f"{gpus} GPUs given to the suite everyday; {there} are there")
    return there if gpus is None else gpus


def several_sides(count: int, device: torch.device, *, guided: bool) -> tuple[Side, ...]:
    """On `count` GPUs, the native ones first. ComfyUI's own node gives a guidance branch to each GPU, so that it has
    nothing to divide without guidance."""
    if count < 2:
        return ()
    devices = ",".join(["cpu"] * count) if device.type == "cpu" else str(count)
    attention = "cudnn-fp8"
    ours = f"ours, {attention}"

    def native(name: str, attention: str | None) -> Side:
        return Side(f"{name}, {count} GPUs", lambda job: native_graph(job, attention, gpus=count), True, count)

    def our(name: str, speed: str = EXACT) -> Side:
        graph = lambda job: our_graph(job, attention, devices=devices, speed=speed)  # noqa: E731
        return Side(f"{name}, {count} GPUs", graph, gpus=count)

    command = Side(f"native, on all GPUs, {count} GPUs", lambda job: all_gpus_graph(job, devices), gpus=count)
    if not guided:
        return (our(ours), command)
    return (
        native("native", None),
        native("native, comfy kitchen attention", KITCHEN),
        our(ours),
        our("ours, fast", "fast"),
        command,
    )


PEER = "the fastest native row"


def check_setups(options: argparse.Namespace, several: Sequence[Side]) -> None:
    """Raise OptionError for a name that no part of the suite has. several: sides for several GPUs."""
    known = {side.name for side in (*SIDES, *OFF_SIDES, *ACCELERATED, *several)}
    if unknown := set(options.setup or ()) - known:
        raise OptionError(f"setup {min(unknown)!r} given; the suite has {', '.join(sorted(known))}")


def chosen(sides: Sequence[Side], options: argparse.Namespace) -> list[Side]:
    """Those that `--setup` names, or all."""
    return [side for side in sides if not options.setup or side.name in options.setup]


def everyday_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the suite. Raises OptionError where there is no ComfyUI."""
    wanted = options.setting or EVERYDAY_PARTS
    count = gpu_count(options.gpus, device)
    check_setups(options, several_sides(count, device, guided=True))
    with server_files(options.scratch, options.checkout) as (checkout, base):
        details |= {"layers": options.layers, "gpus": count}
        for size in sizes:
            width, height, frames = parse_size(size)
            job = Job(width=width, height=height, frames=frames, layers=options.layers)
            write_files(base / "models", device, "i2v", job.layers)
            if set(PARTS) & set(wanted):
                with Server(checkout, base, device, gpus=count) as server:
                    for part, rows in PARTS.items():
                        if part in wanted:
                            yield from rows(server, job, options)
            if "cold" in wanted:
                yield from cold_rows(checkout, base, device, job, options)


def in_turns(
    server: Server,
    sides: Sequence[Side],
    job: Job,
    label: str,
    runs: int,
    native_steps: int | None = None,
    *,
    fresh: bool = False,
) -> Iterator[Row]:
    """`runs` rounds in which every side makes the job, so that what changes meanwhile changes all of them. A row of
    each side after every round, the median so far. Native sides come first, since the others are compared with
    them. native_steps: that native sides run, and their samplers' time is scaled; None: all. fresh: with a prompt of
    its own and another picture in each round."""
    made: dict[str, list[Row]] = {side.name: [] for side in sides}
    medians: dict[str, tuple[Side, Row]] = {}
    latents: dict[str, torch.Tensor] = {}
    for seed in range(job.seed, job.seed + runs):
        for side in sorted(sides, key=lambda side: (side.gpus, not side.native, side.name != NATIVE.name)):
            one, rows = replace(job, seed=seed), made[side.name]
            if fresh:  # of each side's own: ComfyUI keeps what another side made of the same text
                prompt = f"{job.prompt} Take {seed} by {side.name}."
                one = replace(one, prompt=prompt, image=IMAGES[1 + seed % (len(IMAGES) - 1)])
            if rows and "seconds" not in rows[-1]:
                continue
            reason = side.why_not(server.kinds, server.device)
            run = lambda s=side, j=one: one_turn(server, s, job, j, native_steps, None if fresh else latents)  # noqa: E731
            rows.append(guarded(side.name, job.size, reason, run))
            failed = rows[-1] if "seconds" not in rows[-1] else None
            medians[side.name] = side, failed or middle_row(rows)
            row = medians[side.name][1]
            numbers = ratios(side, row, list(medians.values()))
            yield row | numbers | {"name": f"{label}: {side.name}", "gpus": side.gpus}


def one_turn(
    server: Server,
    side: Side,
    job: Job,
    one: Job,
    native_steps: int | None,
    latents: dict[str, torch.Tensor] | None,
) -> Row:
    """The video `one` after one of `job` with two steps that is not counted: ComfyUI keeps loaded models only for the
    prompt that comes next, and the side before had its own. latents: of the first video of each side; None: nothing is
    compared."""
    server.run(side.graph(replace(job, seed=1000 + one.seed, steps=2)))
    if side.native and native_steps is not None and native_steps < job.total_steps:
        row = server.run(side.graph(replace(one, steps=native_steps)))[0]
        more = row["nodes"]["samplers"] * (job.total_steps / native_steps - 1)
        row["nodes"]["samplers"] = round(row["nodes"]["samplers"] + more, 3)
        return row | {"seconds": round(row["seconds"] + more, 3), "steps_measured": native_steps}
    if latents is None or side.name in latents:
        return server.run(side.graph(one))[0]
    row, run = server.run(with_latents(side.graph(one)))
    latents[side.name] = saved_latents(server, run)
    reference = next(iter(latents))
    return row | {"error": relative_error(latents[side.name], latents[reference]), "error_to": reference}


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


def on_rows(server: Server, job: Job, options: argparse.Namespace, *, fresh: bool = False) -> Iterator[Row]:
    sides = chosen((*SIDES, *ACCELERATED, *several_sides(server.gpus, server.device, guided=False)), options)
    label = "on, new prompt and picture" if fresh else "on, new seed"
    yield from in_turns(server, sides, job, label, options.runs or 3, fresh=fresh)


def off_rows(server: Server, job: Job, options: argparse.Namespace) -> Iterator[Row]:
    """Steps of the native nodes take equally long, so that few of them tell the time of all."""
    sides = chosen((*OFF_SIDES, *ACCELERATED, *several_sides(server.gpus, server.device, guided=True)), options)
    yield from in_turns(server, sides, replace(job, four_steps=False), "off", options.runs or 1, options.steps or 4)


def ratios(side: Side, row: Row, found: Sequence[tuple[Side, Row]]) -> Row:
    """To the fastest native row of one GPU, and of as many GPUs as `side` uses."""

    def ratio(gpus: int) -> float | None:
        peers = [other["seconds"] for one, other in found if one.native and one.gpus == gpus and "seconds" in other]
        return round(min(peers) / row["seconds"], 3) if peers and "seconds" in row else None

    one, several = ratio(1), ratio(side.gpus) if side.gpus > 1 else None
    first = {} if one is None else {"ratio": one, "ratio_to": PEER}
    return first if several is None else first | {"ratio_to_native_gpus": several}


PARTS = {"on": on_rows, "fresh": partial(on_rows, fresh=True), "off": off_rows}


def cold_rows(checkout: Path, base: Path, device: torch.device, job: Job, options: argparse.Namespace) -> Iterator[Row]:
    sides = chosen((NATIVE, NATIVE_KITCHEN, OURS, OURS_FP8), options)
    found: dict[str, list[Row]] = defaultdict(list)
    for run in range(options.runs or 3):
        for side in sides:
            found[side.name].append(
                guarded(side.name, job.size, None, lambda s=side, r=run: cold(checkout, base, device, s, r, job))
            )
    measured = {name: [row for row in rows if "seconds" in row] for name, rows in found.items()}
    medians = {name: middle_row(rows) if rows else found[name][0] for name, rows in measured.items()}
    peers = [medians[side.name]["seconds"] for side in sides if side.native and "seconds" in medians[side.name]]
    for name, row in medians.items():
        if peers and "seconds" in row:
            row |= {"ratio": round(min(peers) / row["seconds"], 3), "ratio_to": PEER}
        yield row | {"name": f"cold: {name}"}


def cold(checkout: Path, base: Path, device: torch.device, side: Side, run: int, job: Job) -> Row:
    with Server(checkout, base, device) as server:
        row, made = server.run(side.graph(replace(job, seed=run)))
    steps = [event["at"] - made.begin for event in made.events if event["type"] == "progress"]
    return row | {"progress": [round(at, 3) for at in steps]}
