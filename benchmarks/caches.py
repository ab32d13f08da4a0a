"""Suite `caches`: what a step costs whose blocks do not run, and whether a plan's estimate comes true.

Random weights at full size; one expert serves both phases, since the experts differ in nothing that takes time. Rows,
by name:

full step         median of the computed steps of a run that leaves nothing out, one branch each
skipped, ...      median of the steps whose blocks do not run, one branch each, by the way in which residuals stand in
                  for them; `share` of the full step, the bytes kept in `peak_gib`
plan, ...         a whole denoise with guidance, leaving out what the preset says: its `forwards`, its `seconds` and the
                  plan's own `estimate` from the seconds of one forward, those of the first row; `off` is what the run
                  took over it, less one. A card that slows down as it warms shows here. Also with a resolution
                  schedule (stages)

Times are marks on the device's own timeline, read after the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases import plain_model
from benchmarks.measure import make_room, settle
from benchmarks.rows import Row, guarded
from benchmarks.setups import SETUPS, Setup, find_setup
from benchmarks.trajectory import latent_shape
from wan_core.config import AdaptiveOptions, MagCacheOptions, OptionError, SkipOptions, TaylorSeerOptions
from wan_core.execution.optimize import begin_run
from wan_core.execution.report import GIB, Report, StepClock
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families import choose_task
from wan_core.models.wan.model import WanModel
from wan_core.sampling.cache.curves import find_curve
from wan_core.sampling.cache.magcache import PRESETS
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import Progress, denoise
from wan_core.sampling.plan import Expert, Plan, make_plan
from wan_core.sampling.sparsity.schedule import with_costs
from wan_core.sampling.stages import parse_stages, with_stages

FULL_STEPS = 4
SKIPPING = {  # each computes as few of ten steps as its rule lets it
    "reuse": SkipOptions(magcache=MagCacheOptions(threshold=10, max_skips=9, retention=0.1)),
    "forecast, order 1": SkipOptions(taylorseer=TaylorSeerOptions(interval=9, order=1, retention=0.2)),
    "forecast, order 2": SkipOptions(taylorseer=TaylorSeerOptions(interval=9, order=2, retention=0.3)),
    "adaptive": SkipOptions(adaptive=AdaptiveOptions(threshold=10, max_skips=9, retention=0.1)),
}
PLANS = ("balanced", "fast")
STAGES = "0.5/0.9-0.98"
SKIPPING_STEPS = 10  # a policy switches itself off below


def caches_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """The rows of every size and setup. Raises OptionError for a model whose latents are not the 2.1 VAE's."""
    cuda = device.type == "cuda"
    entries = options.setup or (["fp8 + cudnn-fp8"] if cuda else ["plain torch"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    steps = 40 if options.steps is None else options.steps
    if steps < SKIPPING_STEPS:
        raise OptionError(f"steps {steps} given; policies that skip steps need at least {SKIPPING_STEPS}")
    for setup in map(find_setup, entries):
        if reason := setup.why_not(device, dtype):
            raise OptionError(reason)
        make_room(device)
        model, stride = plain_model(name, device, dtype, options.layers, setup.quantization(device))
        task = choose_task(model.config).task
        if stride != VAE_21.spatial_stride or task.image != "none":
            raise OptionError(f"model {name!r} given; the suite caches takes random:t2v-A14B, tiny or a file like them")
        trial = Trial(setup.apply(model), setup, device)
        for size in sizes:
            yield from trial.rows(size, steps)
        del trial, model


@dataclass
class Trial:
    """One model in one setup."""

    model: WanModel
    setup: Setup
    device: torch.device

    def rows(self, size: str, steps: int) -> Iterator[Row]:
        prefix = "" if self.setup == SETUPS.get("fp8 + cudnn-fp8") else f"{self.setup.name}: "
        self.walk(unguided(2), size)  # loads kernels and compiles
        full = self.walk(unguided(FULL_STEPS), size)
        step = statistics.median(full.seconds)
        yield {"name": f"{prefix}full step", "size": size, **full.memory, "seconds": round(step, 5)}
        curve = find_curve(None, "t2v-A14B")
        # A single phase: the boundary would begin another, with computed steps of its own.
        short, whole = unguided(SKIPPING_STEPS, 0.0), make_plan(steps=steps)
        for label, options in SKIPPING.items():
            plan = leave_out(short, options, curve)
            yield guarded(f"{prefix}skipped, {label}", size, None, lambda p=plan: self.skipped(p, size, step))
        for label in PLANS:
            plan = leave_out(whole, SkipOptions(magcache=PRESETS[label]), curve)
            named = f"{prefix}plan, {steps} steps, {label}"
            yield guarded(named, size, None, lambda p=plan: self.estimated(p, size, step))
        T, Y, X = latent_shape(size, VAE_21)[2:]
        self.walk(with_stages(unguided(3), parse_stages("0.5/0.9-1")), size)  # loads kernels of the smaller size
        staged = with_costs(with_stages(whole, parse_stages(STAGES)), self.model.config, (T, Y, X))
        named = f"{prefix}plan, {steps} steps, stages {STAGES}"
        yield guarded(named, size, None, lambda: self.estimated(staged, size, step))

    def skipped(self, plan: Plan, size: str, step: float) -> Row:
        """The steps of `plan` that ran no block, against the seconds of a full one."""
        walk = self.walk(plan, size)
        seconds = [s for s, forwards in zip(walk.seconds, walk.forwards, strict=True) if forwards == 0]
        if not seconds:
            raise OptionError("no step was skipped: nothing to measure")
        median = statistics.median(seconds)
        numbers = {"seconds": round(median, 6), "share": round(median / step, 5), "steps": len(seconds)}
        return {**numbers, **walk.memory}

    def estimated(self, plan: Plan, size: str, forward: float) -> Row:
        """A whole run against what the plan said of it."""
        walk = self.walk(plan, size)
        said = plan.estimate(dict.fromkeys(plan.experts, forward))
        assert said is not None
        numbers = {"forwards": plan.forwards, "seconds": round(walk.wall, 3), "estimate": round(said, 3)}
        return {**numbers, "off": round(walk.wall / said - 1, 4), **walk.memory}

    @torch.no_grad()
    def walk(self, plan: Plan, size: str) -> Walk:
        """Denoise once."""
        dim = self.model.config.text_dim
        rows = [draw_noise(seed, (1, n, dim)).to(self.device) for seed, n in ((1, 24), (2, 12))]
        noise = draw_noise(0, latent_shape(size, VAE_21)).to(self.device)
        clock, forwards = StepClock(Report(self.device)), list[int]()

        def acquire(_: Expert) -> WanModel:
            begin_run(self.model)
            clock.begin()
            return self.model

        def note(progress: Progress) -> None:
            clock.step(progress.step.expert, progress.forwards)
            forwards.append(progress.forwards)

        settle(self.device)
        begin = time.perf_counter()
        with self.setup.running():
            denoise(plan, acquire, Conditioning(cond=rows[0], uncond=rows[1]), noise, on_step=note)
        settle(self.device)
        wall = time.perf_counter() - begin
        return Walk(wall, clock.step_seconds(), forwards, max(clock.memory.values(), default=0))


def unguided(steps: int, boundary: float | None = None) -> Plan:
    """One branch in every step."""
    return make_plan(steps=steps, boundary=boundary, guidance_high=1.0, guidance_low=1.0)


@dataclass
class Walk:
    """One denoise: seconds in all, and of each step with its forwards; device memory at most."""

    wall: float
    seconds: list[float]
    forwards: list[int]
    peak: int

    @property
    def memory(self) -> Row:
        return {"peak_gib": round(self.peak / GIB, 3)} if self.peak else {}
