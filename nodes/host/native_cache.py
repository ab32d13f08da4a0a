"""Step caching on ComfyUI's own Wan models, through documented hooks alone.

`StepCache` is a wrapper around a sampling run (`WrappersMP.OUTER_SAMPLE`): all that stays on the model are its
options. It makes the plan of the run and hooks a `CachedRun` into the options of this run, which ComfyUI drops at its
end, so that nothing is left after an error or an interruption either. A `CachedRun` is a wrapper around a forward
(`WrappersMP.DIFFUSION_MODEL`). Which step a forward belongs to follows from its sigma, never from a count of calls.

Two things can be kept of a forward. `blocks`: what all blocks add to the tokens, as the engine does, with
`patches_replace`; the curves of MagCache are measured on it. `output`: the velocity that the whole model returns, for
variants that compute beside their blocks (VACE, S2V, Animate): no part of them runs in a skipped step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from comfy.model_patcher import ModelPatcher  # pyright: ignore[reportMissingImports]
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key  # pyright: ignore[reportMissingImports]
from torch import Tensor

from wan_core.config import OptionError, SkipOptions
from wan_core.sampling.build import SamplerRequest, build_sampler_plan
from wan_core.sampling.cache.magcache import find_curve
from wan_core.sampling.cache.residual import Residuals, residual_program
from wan_core.sampling.cache.skipping import skip_words, with_curve
from wan_core.sampling.native.plan import Part, WholeRun, check_native, falls, rising_words
from wan_core.sampling.native.run import RUN, WARNING
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Branch, Step

from .native import compute_dtype, conditions_of, uncompiled_model, with_room
from .native_beside import Patches, check_step_cache
from .native_model import STATEFUL, describe, window_schedule
from .native_reserve import (
    Prompt,
    keep_blocks,
    keep_output,
    kept_bytes,
    lasting,
    prompts_of,
    reuse,
    reuse_blocks,
    running,
    uncompiled,
)

KEY = "wancore_cache"
MORE, SLACK = 1.1, 2**20  # times what ComfyUI was asked for, and bytes: beyond, a report says that more was kept
BLOCKS, OUTPUT = "blocks", "output"
# Variants that compute nothing between their blocks. All others, and those to come, are cached at their output.
PLAIN = ("WanModel", "CameraWanModel", "HumoWanModel", "SCAILWanModel", "SCAIL2WanModel")
BOTH: tuple[Branch, ...] = ("cond", "uncond")


def cache_words(patcher: ModelPatcher, options: SkipOptions) -> str:
    """What a step cache with `options` does on a model, or why a run of 10 steps or more will be refused."""
    model = describe(patcher)
    curve = None if model.task is None or not options.magcache else find_curve(model.path, model.task.name)
    try:
        own, note = with_curve(options, curve, model.name)
    except OptionError as refused:  # by the sampler: the cache is off for few steps and distilled files, whatever it is
        own, note = options, str(refused)
    return skip_words(own) + f" ({note})" * bool(note)


class StepCache:
    """Put on a model by `attach`; called around every sampling run."""

    def __init__(
        self,
        options: SkipOptions,
        whole: WholeRun = WholeRun(),  # noqa: B008
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """report: called after every run, with what was skipped in words. Raises OptionError."""
        check_native(options)
        self.options, self.whole, self.report = options, whole, report
        self.pace: list[float] = []  # seconds of a forward in the last run

    def __call__(
        self, executor: Any, noise: Tensor, latent_image: Tensor, sampler: Any, sigmas: Tensor, *arguments, **keywords
    ):
        guider = executor.class_obj
        hooks = guider.model_options["transformer_options"]
        check_step_cache(hooks)
        native = hooks.get(RUN)
        report = self.report if native is None else native.note  # one text for all that a node does
        if native is not None:
            native.caching = True
        own = sigmas.tolist()
        if not falls(own):
            report(f"{WARNING}step cache: every step is computed; {rising_words(own)}")
            return executor(noise, latent_image, sampler, sigmas, *arguments, **keywords)
        model = describe(guider.model_patcher)
        solver = getattr(getattr(sampler, "sampler_function", None), "__name__", "sampler").removeprefix("sample_")
        names = running(guider, solver.endswith("_cfg_pp"))
        mask = arguments[0] if arguments else keywords.get("denoise_mask")
        request = SamplerRequest(
            sigmas=tuple(own),
            whole=self.whole,
            solver=solver,
            guidance=guider.cfg if names[1:] else 1.0,
            branches=BOTH if names[1:] else BOTH[:1],
            skip=self.options,
            windows=window_schedule(guider.model_options),
            image=mask is not None,
        )
        plan, part = build_sampler_plan(request, model)
        if not any(step.skipped for step in plan.steps):
            report("; ".join([f"{WARNING}step cache: every step is computed", *plan.notes]))
            return executor(noise, latent_image, sampler, sigmas, *arguments, **keywords)
        level = BLOCKS if model.variant in PLAIN and "double_block" not in hooks.get("patches", {}) else OUTPUT
        run = CachedRun(plan, part, level, noise.shape, prompts_of(guider, names), Patches(hooks))
        add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, run, guider.model_options, is_model_options=True)
        add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, run.reserve, guider.model_options, is_model_options=True)
        try:
            return executor(noise, latent_image, sampler, sigmas, *arguments, **keywords)
        finally:
            line = f"step cache ({skip_words(self.options)}): {run.finish(self.pace)}"
            if native is not None:
                native.skipped = run.reused, run.forwards
            report("; ".join([line, *plan.notes]))


def attach(patcher: ModelPatcher, cache: StepCache | None) -> None:
    """Put `cache` on a clone of a model, in place of one that is there; None takes that away. Raises OptionError."""
    variant = describe(patcher).variant
    if cache is not None and variant in STATEFUL:
        raise OptionError(
            f"{variant} keeps state between its forwards, so none can be skipped: leave out the step cache"
        )
    if cache is not None:
        check_step_cache(patcher.model_options["transformer_options"])
    patcher.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    if cache is not None:
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, cache)


def attached(patcher: ModelPatcher) -> StepCache | None:
    """The step cache of a model."""
    return next(iter(patcher.wrappers.get(WrappersMP.OUTER_SAMPLE, {}).get(KEY, [])), None)


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
