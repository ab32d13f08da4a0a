"""Step caching on ComfyUI's own Wan models, through documented hooks alone.

A `CachedRun` is a wrapper around a forward (`WrappersMP.DIFFUSION_MODEL`), in the options of one sampling run, which
ComfyUI drops at its end: nothing is left after an error or an interruption either. Which step a forward belongs to
follows from its sigma, never from a count of calls.

Two things can be kept of a forward. `blocks`: what all blocks add to the tokens, as the engine does, with
`patches_replace`; the curves of MagCache are measured on it. `output`: the velocity that the whole model returns, for
variants that compute beside their blocks (VACE, S2V, Animate): no part of them runs in a skipped step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from math import inf
from typing import Any

from comfy.patcher_extension import WrappersMP, add_wrapper_with_key  # pyright: ignore[reportMissingImports]
from torch import Tensor

from wan_core.sampling.cache.residual import Residuals, residual_program
from wan_core.sampling.native.plan import Part
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Step

from .native import compute_dtype, conditions_of, uncompiled_model, with_room
from .native_beside import Patches
from .native_model import describe
from .native_reserve import (
    Prompt,
    keep_blocks,
    keep_output,
    kept_bytes,
    lasting,
    prompts_of,
    reuse,
    reuse_blocks,
    uncompiled,
)

KEY = "wancore_cache"
MORE, SLACK = 1.1, 2**20  # times what ComfyUI was asked for, and bytes: beyond, a report says that more was kept
BLOCKS, OUTPUT = "blocks", "output"
# Variants that compute nothing between their blocks. All others, and those to come, are cached at their output.
PLAIN = ("WanModel", "CameraWanModel", "HumoWanModel", "SCAILWanModel", "SCAIL2WanModel")


def cached_run(guider: Any, plan: Plan, part: Part, shape: Sequence[int], names: Sequence[str]) -> CachedRun:
    """What skips forwards by `plan` in a sampling run, hooked into its options. shape: of the latents, [B, C, T, Y, X].
    names: of the guider's conditions that run."""
    own = guider.model_options
    hooks = own["transformer_options"]
    plain = describe(guider.model_patcher).variant in PLAIN and "double_block" not in hooks.get("patches", {})
    run = CachedRun(plan, part, BLOCKS if plain else OUTPUT, shape, prompts_of(guider, names), Patches(hooks))
    add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, run, own, is_model_options=True)
    add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, run.reserve, own, is_model_options=True)
    return run


class CachedRun:
    """One sampling run: decides for every forward, and holds what is kept until `finish`.

    Every condition has a state of its own, see `conditions_of`. Threads may call it at the same time, each with other
    conditions.
    """

    def __init__(
        self,
        plan: Plan,
        part: Part,
        level: str,
        shape: Sequence[int],
        prompts: Sequence[Prompt],
        patches: Patches,
    ) -> None:
        """shape: of the latents, [B, C, T, Y, X]. prompts: what runs. patches: on the model."""
        self.plan, self.part, self.level = plan, part, level
        self.shape, self.prompts = shape, prompts
        self.steps = {step.index: step for step in plan.steps}
        self.phases = {step.index: phase for phase in plan.phases for step in phase}
        self.lock = threading.Lock()
        self.phase: tuple[Step, ...] = ()
        self.states: dict[tuple[Any, ...], Residuals] = {}
        self.sigma: tuple[Tensor | None, float] = (None, 0.0)
        self.patches = patches
        self.forwards = self.reused = self.most = 0
        self.reserved_bytes = inf  # bytes that ComfyUI was asked for
        self.began = 0.0

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

        index, begins, states, skip = self._begin(x, options)
        blocks = len(executor.class_obj.blocks)
        if skip:
            return (
                reuse_blocks(forward, states, index, options, blocks) if self.level == BLOCKS else reuse(states, index)
            )
        if not begins:
            return forward(options)
        keep = keep_blocks if self.level == BLOCKS else keep_output
        output = keep(forward, states, index, options, blocks)
        self._end()
        return output

    @lasting
    def _begin(self, x: Tensor, options: dict[str, Any]) -> tuple[int, bool, list[Residuals], bool]:
        """Step of a forward, whether it may be kept (not within a step, nor with new patches on the model), the states
        of its conditions, and whether it is skipped."""
        with self.lock:
            index, begins = self.part.step_at(self._value(options["sigmas"]))
            begins &= self.patches.enter(index, options)[1]
            keys = self._enter(index, x, options)
            states = [self.states[key] for key in keys]
            skip = bool(self.steps[index].skipped) and all(state.can_skip(index) for state in states)
            self.forwards += len(keys)
            self.reused += len(keys) * skip
        return index, begins, states, skip

    @lasting
    def _end(self) -> None:
        with self.lock:
            self.most = max(self.most, sum(state.bytes for state in self.states.values()))

    def reserve(
        self, executor: Any, model: Any, noise_shape: Sequence[int], conds: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        """A wrapper of PREPARE_SAMPLING: ComfyUI frees memory for latents of `noise_shape`, here for residuals too."""
        reserved = kept_bytes(
            self.plan.phases,
            self.prompts,
            uncompiled_model(model.model.diffusion_model),
            self.level == BLOCKS,
            self.shape,
            compute_dtype(model).itemsize,
            keywords.get("model_options") or {},
        )
        self.reserved_bytes = reserved
        return executor(model, with_room(noise_shape, model, reserved), conds, *arguments, **keywords)

    def finish(self, pace: list[float]) -> str:
        """Free everything; says in words what was done. pace: gets the seconds of a computed forward."""
        computed = self.forwards - self.reused
        if computed:
            pace[:] = [(time.perf_counter() - self.began) / computed]
        self.states.clear()
        self.patches.seen.clear()
        self.sigma = None, 0.0
        freed = f"{self.level} kept in {self.most / 2**30:.2f} GiB, freed"
        lines = [f"{self.reused} of {self.forwards} forwards skipped, {freed}"]
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

    def _enter(self, index: int, x: Tensor, options: dict[str, Any]) -> list[tuple[Any, ...]]:
        """The conditions of a forward, each with a state; of another expert nothing is left."""
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
        return keys
