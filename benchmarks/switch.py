"""Suite `switch`: the change of experts in the middle of a generation, with everything resident.

A few steps with random weights at full size, the boundary between the middle two; text encoder and VAE are on the
device as well. A row for each setup:

seconds, spread   median of a step (both guidance branches), and the range over all steps
step_spread       that range over the median: 0.03 is steady within 3 %
switch_ms         from the end of the last high-noise step to the first forward of the low-noise expert: acquiring it,
                  and its keys and values of the prompts
peak_gib          device memory at most while denoising; `weights_gib` of it holds the weights of all four models

Times are marks on the device's own timeline, read after the end. A shorter denoise over both experts, without guidance,
runs first: it compiles and loads kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.cases import parse_size
from benchmarks.generation import PROMPT
from benchmarks.measure import make_room, settle, weights_bytes
from benchmarks.rows import Row, guarded
from benchmarks.setups import SETUPS, Setup, find_setup
from wan_core.config import OptionError, Request
from wan_core.execution.report import GIB
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.denoise import Progress, denoise
from wan_core.sampling.plan import make_plan

DEFAULT_SETUPS = ("fp8", "fp8 + cudnn-fp8 + compile")


def switch_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """A row for each size and setup. Raises OptionError for fewer than two steps, or a task with one expert."""
    steps = 4 if options.steps is None else options.steps
    if steps < 2:
        raise OptionError(f"steps {steps} given; a change of experts needs at least 2")
    setups = [find_setup(entry) for entry in options.setup or [n for n in DEFAULT_SETUPS if n in SETUPS]]
    for size in sizes:
        for setup in setups:
            make_room(device)
            # The same test as in a user's run: the pipeline itself refuses what cannot run here.
            yield guarded(setup.name, size, None, lambda s=setup, z=size: measure_switch(name, s, z, steps, device))


def measure_switch(name: str, setup: Setup, size: str, steps: int, device: torch.device) -> Row:
    """One run; see the module's table. Raises OptionError for what cannot run here."""
    pipe = Pipeline.load(setup.load_options(name, device))
    if not pipe.models.task.two_experts:
        raise OptionError(f"{pipe.models.task.name} has one transformer and nothing to switch to")
    weights = sum(weights_bytes(model) for model in pipe.models.residency.models.values())
    width, height, frames = parse_size(size)

    def request(count: int, guidance: float | None) -> Request:
        task = pipe.models.task
        timesteps = [step.timestep for step in make_plan(task=task.name, steps=count, shift=task.shift).steps]
        middle = sum(timesteps[count // 2 - 1 : count // 2 + 1]) / 2000
        return Request(
            prompt=PROMPT, width=width, height=height, frames=frames, steps=count, boundary=middle,
            guidance_high=guidance, guidance_low=guidance,
        )  # fmt: skip

    walk(pipe, request(2, 1.0), setup)
    clock = walk(pipe, request(steps, None), setup)
    seconds = clock.step_seconds()
    median = statistics.median(seconds)
    spread = max(seconds) - min(seconds)
    return {
        "steps": steps,
        "seconds": round(median, 5),
        "spread": round(spread, 5),
        "step_spread": round(spread / median, 4),
        "switch_ms": round(clock.switch_seconds() * 1000, 3),
        **({"peak_gib": round(clock.peak / GIB, 3)} if clock.peak else {}),
        "weights_gib": round(weights / GIB, 3),
        "step_seconds": [round(value, 4) for value in seconds],
    }


@torch.no_grad()
def walk(pipe: Pipeline, request: Request, setup: Setup) -> Clock:
    """Denoise once, with a mark at the begin of every forward and at the end of every step."""
    job = pipe.prepare(request)
    conditioning = pipe.encode(job)
    noise = draw_noise(job.request.seed, job.latent_shape).to(pipe.models.device)
    clock = Clock(pipe.models.device)
    hooks = [pipe.models.expert(name).register_forward_pre_hook(clock.forward) for name in job.plan.experts]
    settle(clock.device)
    if clock.cuda:
        torch.cuda.reset_peak_memory_stats(clock.device)
    try:
        with setup.running():
            denoise(job.plan, pipe.models.expert, conditioning, noise, batched=job.batched, on_step=clock.step)
    finally:
        for hook in hooks:
            hook.remove()
    settle(clock.device)
    clock.peak = torch.cuda.max_memory_allocated(clock.device) if clock.cuda else 0
    return clock


@dataclass
class Clock:
    """Marks of one denoise: (expert, begin of its first forward, end) of every step."""

    device: torch.device
    steps: list[tuple[str, Any, Any]] = field(default_factory=list)
    begun: Any = None
    peak: int = 0

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def forward(self, module: nn.Module, arguments: Any) -> None:
        self.begun = self.begun or self._mark()

    def step(self, progress: Progress) -> None:
        self.steps.append((progress.step.expert, self.begun, self._mark()))
        self.begun = None

    def step_seconds(self) -> list[float]:
        return [self._between(begin, end) for _, begin, end in self.steps]

    def switch_seconds(self) -> float:
        """From the end of the last step of one expert to the first forward of the next."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return next(self._between(one[2], two[1]) for one, two in pairs if one[0] != two[0])

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self.cuda else end - begin
