"""Step caching on ComfyUI's own Wan models, through documented hooks alone.

A `CachedRun` is a wrapper around a forward (`WrappersMP.DIFFUSION_MODEL`), in the options of one sampling run, which
ComfyUI drops at its end: nothing is left after an error or an interruption either. Which step a forward belongs to
follows from its sigma, never from a count of calls.

Two things can be kept of a forward. What all blocks add to the tokens, as the engine does, with `patches_replace`; the
curves of MagCache are measured on it. Or the velocity that the whole model returns, for variants that compute beside
their blocks (VACE, S2V, Animate): no part of them runs in a skipped step.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeVar, cast

import torch
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key  # pyright: ignore[reportMissingImports]
from torch import Tensor

from wan_core.sampling.cache.residual import KeptForward, Residuals, residual_program
from wan_core.sampling.native.plan import Part
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Step

from .native import compute_dtype, conditions_of, uncompiled_model, with_room
from .native_beside import Patches, apart, pause
from .native_model import describe
from .native_reserve import most_kept, prompts_of

KEY = "wancore_cache"
MORE, SLACK = 1.1, 2**20  # times what ComfyUI was asked for, and bytes: beyond, a report says that more was kept
# Variants that compute nothing between their blocks. All others, and those to come, are cached at their output.
PLAIN = ("WanModel", "CameraWanModel", "HumoWanModel", "SCAILWanModel", "SCAIL2WanModel")
Function = TypeVar("Function", bound=Callable[..., Any])
Forward = Callable[[dict[str, Any]], Tensor]
"""transformer_options -> the model's output."""


# torch.compile may be around the whole model: what changes from step to step is not compiled, or every step would be
# compiled again.
def eager(function: Function) -> Function:
    """Exclude `function` and all that it calls from torch.compile."""
    return cast(Function, torch.compiler.disable(function))


def uncompiled(function: Function) -> Function:
    """Exclude `function` from torch.compile; what it calls may be compiled."""
    return cast(Function, torch.compiler.disable(function, recursive=False))


def lasting(function: Function) -> Function:
    """Exclude like `eager` what keeps tensors for later forwards."""

    @functools.wraps(function)
    def keep(*args: Any) -> Any:
        with pause():
            return function(*args)

    return cast(Function, eager(keep))


class CachedRun:
    """One sampling run: decides for every forward, and holds what is kept until `finish`.

    Every condition has a state of its own, see `conditions_of`. Threads may call it at the same time, each with other
    conditions.
    """

    def __init__(self, guider: Any, plan: Plan, part: Part, shape: Sequence[int], names: Sequence[str]) -> None:
        """Hook it into the options of a guider's run by `plan`. shape: of the latents, [B, C, T, Y, X]. names: of the
        guider's conditions that run."""
        own = guider.model_options
        hooks = own["transformer_options"]
        variant = describe(guider.model_patcher).variant
        self.of_blocks = variant in PLAIN and "double_block" not in hooks.get("patches", {})
        self.plan, self.part, self.shape, self.prompts = plan, part, shape, prompts_of(guider, names)
        self.steps = {step.index: step for step in plan.steps}
        self.phases = {step.index: phase for phase in plan.phases for step in phase}
        self.lock = threading.Lock()
        self.phase: tuple[Step, ...] = ()
        self.states: dict[tuple[Any, ...], Residuals] = {}
        self.sigma: tuple[Tensor | None, float] = (None, 0.0)
        self.patches = Patches(hooks)
        self.forwards = self.reused = self.most = 0
        self.reserved_bytes = inf  # bytes that ComfyUI was asked for
        self.began = 0.0
        add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, self, own, is_model_options=True)
        add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, self.reserve, own, is_model_options=True)

    @uncompiled
    def __call__(
        self,
        executor: Any,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        clip_fea: Tensor | None = None,
        time_dim_concat: Tensor | None = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        options = transformer_options or {}

        def forward(options: dict[str, Any]) -> Tensor:
            return executor(x, timestep, context, clip_fea, time_dim_concat, options, **kwargs)

        kept, begins, skip = self._begin(x, options)
        blocks = len(executor.class_obj.blocks)
        if skip:
            return reuse_blocks(forward, kept, options, blocks) if self.of_blocks else eager(kept.reused)()
        if not begins:
            return forward(options)
        if self.of_blocks:
            output = keep_blocks(forward, kept, options, blocks)
        else:
            output = forward(options)
            lasting(kept.output)(output)
        self._end()
        return output

    @lasting
    def _begin(self, x: Tensor, options: dict[str, Any]) -> tuple[KeptForward, bool, bool]:
        """What a forward keeps or uses of its conditions, whether it may keep it (not within a step, nor with new
        patches on the model), and whether it is skipped."""
        with self.lock:
            index, begins = self.part.step_at(self._value(options["sigmas"]))
            begins &= self.patches.enter(index, options)
            states = self._enter(index, x, options)
            skip = bool(self.steps[index].skipped) and all(state.can_skip(index) for state in states)
            self.forwards += len(states)
            self.reused += len(states) * skip
        return KeptForward(states, index), begins, skip

    @lasting
    def _end(self) -> None:
        with self.lock:
            self.most = max(self.most, sum(state.bytes for state in self.states.values()))

    def reserve(
        self, executor: Any, model: Any, noise_shape: Sequence[int], conds: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        """A wrapper of PREPARE_SAMPLING: ComfyUI frees memory for latents of `noise_shape`, here for residuals too."""
        dit, options = uncompiled_model(model.model.diffusion_model), keywords.get("model_options") or {}
        numbers = most_kept(self.plan.phases, self.prompts, dit, self.of_blocks, self.shape, options)
        self.reserved_bytes = numbers * compute_dtype(model).itemsize
        return executor(model, with_room(noise_shape, model, self.reserved_bytes), conds, *arguments, **keywords)

    def finish(self, pace: list[float]) -> str:
        """Free everything; says in words what was done. pace: gets the seconds of a computed forward."""
        computed = self.forwards - self.reused
        if computed:
            pace[:] = [(time.perf_counter() - self.began) / computed]
        self.states.clear()
        self.patches.seen.clear()
        self.sigma = None, 0.0
        what = "blocks" if self.of_blocks else "output"
        lines = [
            f"{self.reused} of {self.forwards} forwards skipped, {what} kept in {self.most / 2**30:.2f} GiB, freed"
        ]
        if self.most > MORE * self.reserved_bytes + SLACK:
            lines.append(
                f"warning: that is more than the {self.reserved_bytes / 2**30:.2f} GiB that ComfyUI was asked for"
            )
        return "; ".join([*lines, *self.patches.words("the step cache")])

    # Below: called with the lock held.

    def _value(self, sigmas: Tensor) -> float:
        """Read from the device once for each evaluation, which the conditions of a step share."""
        if self.sigma[0] is not sigmas:
            self.sigma = sigmas, float(sigmas[0])
        return self.sigma[1]

    def _enter(self, index: int, x: Tensor, options: dict[str, Any]) -> list[Residuals]:
        """The states of the conditions of a forward; of another expert nothing is left."""
        phase = self.phases[index]
        if phase is not self.phase:
            self.began = self.began or time.perf_counter()
            self.states.clear()
            self.phase = phase
        self.states = {key: state for key, state in self.states.items() if key[-1] in self.patches.seen}
        keys = conditions_of(x, options)
        for key in keys:
            if key not in self.states:  # every branch of a step is skipped or none: see `check_native`
                self.states[key] = Residuals(residual_program(phase, "cond"))
        return [self.states[key] for key in keys]


@uncompiled
def reuse_blocks(forward: Forward, kept: KeptForward, options: dict[str, Any], blocks: int) -> Tensor:
    """The first block adds what all of them added, the others nothing."""

    def first(args: dict[str, Any], run: Any) -> dict[str, Any]:
        return {"img": eager(kept.reused)(args["img"])}

    for block in range(blocks):
        options = around(options, block, first if block == 0 else lambda args, run: {"img": args["img"]})
    with apart(options, "reuse"):  # pyright: ignore[reportCallIssue] # torch types what it disables as its own class
        return forward(options)


@uncompiled
def keep_blocks(forward: Forward, kept: KeptForward, options: dict[str, Any], blocks: int) -> Tensor:
    """Keeps the tokens before the first block and what the last has made of them, where the program of a state has a
    slot for the step. Where none has, the hooks are the same: compiled code of both is one."""

    def first(args: dict[str, Any], run: Any) -> dict[str, Any]:
        lasting(kept.before)(args["img"])
        return run(args)

    def last(args: dict[str, Any], run: Any) -> dict[str, Any]:
        output = run(args)
        lasting(kept.after)(output["img"])
        return output

    options = around(around(options, 0, first), blocks - 1, last)
    with apart(options, "keep"):  # pyright: ignore[reportCallIssue] # torch types what it disables as its own class
        return forward(options)


def around(options: dict[str, Any], block: int, replacement: Callable[..., Any]) -> dict[str, Any]:
    """A copy of `options` with replacement(args, run) in the place of a block; `run` is what was there."""
    replaced = options.get("patches_replace", {})
    there = replaced.get("dit", {}).get(("double_block", block))

    @uncompiled  # or the step of the first forward would be a constant of the compiled code
    def patch(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        return replacement(args, extra["original_block"] if there is None else lambda args: there(args, extra))

    dit = {**replaced.get("dit", {}), ("double_block", block): patch}
    return {**options, "patches_replace": {**replaced, "dit": dit}}
