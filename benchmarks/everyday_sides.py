"""Who makes the video of suite `everyday`: its rows, on one GPU and on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.comfy_graphs import Job, accelerated_graph, native_graph, our_graph
from benchmarks.comfyui import Graph
from wan_core.config import OptionError


@dataclass(frozen=True)
class Side:
    """A row: who makes the video, and how. native: with nothing of ours. gpus: that it uses."""

    name: str
    graph: Callable[[Job], Graph]
    native: bool = False
    gpus: int = 1


KITCHEN = "comfy kitchen attention"
NATIVE = Side("native", native_graph, native=True)
NATIVE_KITCHEN = Side("native, comfy kitchen attention", lambda job: native_graph(job, attention=KITCHEN), native=True)
OURS = Side("ours, auto", our_graph)
OURS_FP8 = Side("ours, cudnn-fp8", lambda job: our_graph(job, "cudnn-fp8"))
SIDES = (
    NATIVE_KITCHEN,  # the faster peer first: the rows after it are compared with it
    NATIVE,
    OURS,
    OURS_FP8,
    Side("ours, cudnn-fp8, sparse fast", lambda job: our_graph(job, "cudnn-fp8", {"sparse": "fast"})),
)
OFF_SIDES = (
    NATIVE,
    NATIVE_KITCHEN,
    OURS,
    OURS_FP8,
    Side(
        "ours, cudnn-fp8, cache and sparse balanced",
        lambda job: our_graph(job, "cudnn-fp8", {"cache": "balanced", "sparse": "balanced"}),
    ),
)
ATTACHED = Side("ours, auto, LoRAs attached", lambda job: our_graph(job, lora_mode="attach"))
ACCELERATED = (
    Side("native, accelerated, auto", lambda job: accelerated_graph(job, "auto")),
    Side("native, accelerated, sparse fast", lambda job: accelerated_graph(job, "cudnn-fp8", {"sparse": "fast"})),
)


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
    cpu = device.type == "cpu"
    devices, attention = (",".join(["cpu"] * count), "auto") if cpu else (str(count), "cudnn-fp8")
    ours = f"ours, {attention}"

    def native(name: str, attention: str | None) -> Side:
        return Side(f"{name}, {count} GPUs", lambda job: native_graph(job, attention, gpus=count), True, count)

    def our(name: str, presets: dict[str, str] | None = None) -> Side:
        graph = lambda job: our_graph(job, attention, presets, devices=devices)  # noqa: E731
        return Side(f"{name}, {count} GPUs", graph, gpus=count)

    if not guided:
        return (our(ours),)
    fast = {"cache": "fast", "sparse": "fast"}
    return (
        native("native", None),
        native("native, comfy kitchen attention", KITCHEN),
        our(ours),
        our(f"{ours}, cache and sparse fast", fast),
    )
