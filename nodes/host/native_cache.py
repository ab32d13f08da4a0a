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
from dataclasses import replace
from math import isclose, prod
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key
from torch import Tensor

from wan_core.config import OptionError, SkipOptions
from wan_core.sampling.cache.adaptive_run import Adaptive
from wan_core.sampling.cache.curves import find_curve
from wan_core.sampling.cache.residual import Residuals, residual_program
from wan_core.sampling.cache.skipping import check_cacheable, leave_out, looks_distilled, skip_words
from wan_core.sampling.cutting import without_lost_sources
from wan_core.sampling.native.plan import Part, WholeRun, check_native, cut, plan_part
from wan_core.sampling.native.run import RUN
from wan_core.sampling.plan import Branch, Plan, Step
from wan_core.sampling.sparsity.schedule import sparsify
from wan_core.sampling.stages import with_stages

from .native import compute_dtype, tokens_of, with_room
from .native_kept import eager, keep_blocks, keep_output, reuse, reuse_blocks, uncompiled
from .native_model import STATEFUL, NativeModel, describe
from .native_stages import stages_of

KEY = "wancore_cache"
BLOCKS, OUTPUT = "blocks", "output"
# Variants that compute nothing between their blocks. All others, and those to come, are cached at their output.
PLAIN = ("WanModel", "CameraWanModel", "HumoWanModel", "SCAILWanModel", "SCAIL2WanModel")
STATIC_WINDOWS = ("standard_static", "batched")  # schedules of context windows that are the same in every step
BOTH: tuple[Branch, ...] = ("cond", "uncond")


def native_plan(
    model: NativeModel,
    part: Part,
    options: SkipOptions,
    *,
    guidance: float,
    branches: tuple[Branch, ...],
    solver: str,
    image: bool = False,
) -> Plan:
    """The plan of the whole run of which a sampler walks `part`. image: it starts from one (5B). Raises OptionError."""
    plan = plan_part(
        part,
        task=model.name,
        solver=f"ComfyUI {solver}",
        shift=model.shift,
        boundary=model.boundary,
        guidance=guidance,
        branches=branches,
    )
    own = part.whole[part.first : part.stop + 1]
    plan = with_stages(replace(plan, notes=(model.note,) if model.note else ()), options.stages, own)
    if solver == "lcm" and replace(options, sparse=None, stages=()) != SkipOptions():
        check_cacheable(solver, "the step cache")
    curve = None
    if options.magcache is not None and model.task is not None:
        curve = find_curve(model.path, model.task.name, image=image)
    distilled = model.path.name if model.path is not None and looks_distilled(model.path) else ""
    plan = leave_out(sparsify(plan, options.sparse), options, curve, distilled=distilled)
    return replace(plan, steps=without_lost_sources(plan.steps)) if options.stages else plan


def plan_of_part(
    model: NativeModel, sigmas: Sequence[float], whole: WholeRun, options: SkipOptions, **run: Any
) -> Plan:
    """The plan of the steps between `sigmas` alone. run: as for `native_plan`."""
    part = whole.place(sigmas, model.shift)
    return cut(native_plan(model, part, options, **run), part)


class StepCache:
    """Put on a model by `attach`; called around every sampling run."""

    def __init__(
        self,
        options: SkipOptions,
        whole: WholeRun = WholeRun(),  # noqa: B008
        report: Callable[[str], None] = lambda words: None,
    ) -> None:
        """report: called after every run, with what was skipped in words. Raises OptionError."""
        check_native(options)
        self.options, self.whole, self.report = options, whole, report
        self.pace: list[float] = []  # seconds of a forward in the last run

    def __call__(
        self, executor: Any, noise: Tensor, latent_image: Tensor, sampler: Any, sigmas: Tensor, *rest, **named
    ):
        guider = executor.class_obj
        hooks = guider.model_options["transformer_options"]
        if "easycache" in hooks:
            raise OptionError("EasyCache or LazyCache and WanCore's step cache are on one model: remove one of them")
        report = hooks[RUN].notes.append if RUN in hooks else self.report  # one text for all that a node does
        model = describe(guider.model_patcher)
        part = self.whole.place(sigmas.tolist(), model.shift)
        guided = "negative" in guider.conds and not (
            isclose(guider.cfg, 1.0) and not guider.model_options.get("disable_cfg1_optimization", False)
        )
        mask = rest[0] if rest else named.get("denoise_mask")
        planned = native_plan(
            model,
            part,
            replace(self.options, stages=stages_of(guider.model_patcher)),
            guidance=guider.cfg if guided else 1.0,
            branches=BOTH if guided else BOTH[:1],
            solver=getattr(getattr(sampler, "sampler_function", None), "__name__", "sampler").removeprefix("sample_"),
            image=mask is not None,
        )
        plan = moving_windows(cut(planned, part), guider.model_options)
        if not any(step.skipped for step in plan.steps):
            report("; ".join(["step cache: every step is computed", *plan.notes]))
            return executor(noise, latent_image, sampler, sigmas, *rest, **named)
        level = BLOCKS if model.variant in PLAIN and "double_block" not in hooks.get("patches", {}) else OUTPUT
        run = CachedRun(plan, part, level)
        add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, run, guider.model_options, is_model_options=True)
        add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, run.reserve, guider.model_options, is_model_options=True)
        try:
            return executor(noise, latent_image, sampler, sigmas, *rest, **named)
        finally:
            words = f"step cache ({skip_words(self.options)}): {run.finish(self.pace)}"
            report("; ".join([words, *plan.notes]))


def attach(patcher: ModelPatcher, cache: StepCache | None) -> None:
    """Put `cache` on a clone of a model, in place of one that is there; None takes that away. Raises OptionError."""
    variant = describe(patcher).variant
    if cache is not None and variant in STATEFUL:
        raise OptionError(
            f"{variant} keeps state between its forwards, so none can be skipped: leave out the step cache"
        )
    patcher.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    if cache is not None:
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, cache)


def attached(patcher: ModelPatcher) -> StepCache | None:
    """The step cache of a model."""
    return next(iter(patcher.wrappers.get(WrappersMP.OUTER_SAMPLE, {}).get(KEY, [])), None)


def moving_windows(plan: Plan, model_options: dict[str, Any]) -> Plan:
    """`plan` without skipped steps where context windows move from step to step: a residual belongs to its window."""
    handler = model_options.get("context_handler")
    schedule = getattr(getattr(handler, "context_schedule", None), "name", None)
    if handler is None or schedule in STATIC_WINDOWS or not any(step.skipped for step in plan.steps):
        return plan
    note = (
        f"off: context windows of the schedule {schedule} move from step to step; {' and '.join(STATIC_WINDOWS)} stay"
    )
    steps = tuple(replace(step, action="compute", skipped=(), order=0) for step in plan.steps)
    return replace(plan, steps=steps, notes=(*plan.notes, note))


class CachedRun:
    """One sampling run: decides for every forward, and holds what is kept until `finish`.

    Every condition has a state of its own: its entry in `cond_or_uncond`, its uuid, its context window, the size of its
    latents and the other replacements of blocks that are in force (skip-layer guidance runs a condition twice).
    Threads may call it at the same time, each with other conditions.
    """

    def __init__(self, plan: Plan, part: Part, level: str) -> None:
        self.plan, self.part, self.level = plan, part, level
        self.steps = {step.index: step for step in plan.steps}
        self.phases = {step.index: phase for phase in plan.phases for step in phase}
        self.lock = threading.Lock()
        self.phase: tuple[Step, ...] = ()
        self.states: dict[tuple[Any, ...], Residuals] = {}
        self.adaptive: Adaptive | None = None
        self.noted: tuple[int, tuple[Any, ...] | None] = (-1, None)  # newest step, and the condition that is measured
        self.sigma: tuple[Tensor | None, float] = (None, 0.0)
        self.forwards = self.reused = self.most = 0
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

        index, begins, keys, states, skip = self._begin(x, options)
        blocks = len(executor.class_obj.blocks)
        if skip:
            return (
                reuse_blocks(forward, states, index, options, blocks) if self.level == BLOCKS else reuse(states, index)
            )
        if not begins:
            return forward(options)
        keep = keep_blocks if self.level == BLOCKS else keep_output
        output = keep(forward, states, index, options, blocks)
        self._end(index, keys, output)
        return output

    @eager
    def _begin(
        self, x: Tensor, options: dict[str, Any]
    ) -> tuple[int, bool, list[tuple[Any, ...]], list[Residuals], bool]:
        """Step of a forward, whether it is at the step's beginning, its conditions, their states, and whether it is
        skipped."""
        with self.lock:
            index, begins = self.part.step_at(self._value(options["sigmas"]))
            keys = self._enter(index, x, options)
            states = [self.states[key] for key in keys]
            skip = self._decide(self.steps[index]) and all(state.can_skip(index) for state in states)
            self.forwards += len(keys)
            self.reused += len(keys) * skip
        return index, begins, keys, states, skip

    @eager
    def _end(self, index: int, keys: list[tuple[Any, ...]], output: Tensor) -> None:
        with self.lock:
            self.most = max(self.most, sum(state.bytes for state in self.states.values()))
            self._note(index, keys, output)

    def reserve(
        self, executor: Any, model: Any, noise_shape: Sequence[int], conds: Any, *rest: Any, **named: Any
    ) -> Any:
        """A wrapper of PREPARE_SAMPLING: ComfyUI frees memory for latents of `noise_shape`, here for residuals too."""
        counts = {branch: len(conds.get(name, ())) for branch, name in NAMES.items()}
        kept = self.expected_bytes(noise_shape, model, counts)
        return executor(model, with_room(noise_shape, model, kept), conds, *rest, **named)

    def expected_bytes(self, shape: Sequence[int], model: ModelPatcher, counts: dict[Branch, int]) -> int:
        """What the residuals will take for latents of `shape` [B, C, T, Y, X]. counts: conditions of each branch."""
        slots = max(sum(residual_program(p, b).slots * n for b, n in counts.items()) for p in self.plan.phases)
        dit, size = model.model.diffusion_model, prod(shape)
        if self.level == BLOCKS:
            size = tokens_of(dit, shape) * dit.dim
        return slots * size * compute_dtype(model).itemsize

    def finish(self, pace: list[float]) -> str:
        """Free everything; says in words what was done. pace: gets the seconds of a computed forward."""
        computed = self.forwards - self.reused
        if computed:
            pace[:] = [(time.perf_counter() - self.began) / computed]
        self.states.clear()
        self.adaptive, self.sigma, self.noted = None, (None, 0.0), (-1, None)
        kept = f"{self.level} kept in {self.most / 2**30:.2f} GiB, freed"
        return f"{self.reused} of {self.forwards} forwards skipped, {kept}"

    # Below: called with the lock held.

    def _value(self, sigmas: Tensor) -> float:
        """Read from the device once for each evaluation, which the conditions of a step share."""
        if self.sigma[0] is not sigmas:
            self.sigma = sigmas, float(sigmas[0])
        return self.sigma[1]

    def _enter(self, index: int, x: Tensor, options: dict[str, Any]) -> list[tuple[Any, ...]]:
        """The conditions of a forward, each with a state; in a new phase nothing of the one before."""
        if self.phases[index] is not self.phase:
            self.began = self.began or time.perf_counter()
            self.states.clear()
            self.phase = self.phases[index]
            self.adaptive, self.noted = None, (-1, None)
            if self.plan.adaptive is not None and any(step.action == "adaptive" for step in self.phase):
                self.adaptive = Adaptive(self.plan.adaptive, self.part.total, x.device)
        window = options.get("context_window")
        replaced = options.get("patches_replace", {}).get("dit", {})
        shared = (
            None if window is None else tuple(window.index_list),
            (x.shape[0] // len(options["cond_or_uncond"]), *x.shape[1:]),
            x.device,
            tuple(sorted((str(block), id(patch)) for block, patch in replaced.items())),
        )
        keys = [(i, uuid, *shared) for i, uuid in zip(options["cond_or_uncond"], options["uuids"], strict=True)]
        for key in keys:
            if key not in self.states:
                branch = BOTH[min(key[0], 1)]
                self.states[key] = Residuals(residual_program(self.phase, branch))
        return keys

    def _decide(self, step: Step) -> bool:
        return bool(step.skipped) if self.adaptive is None else self.adaptive.decide(step)

    def _note(self, index: int, keys: list[tuple[Any, ...]], output: Tensor) -> None:
        """For the adaptive policy: the velocity of the first prompt, once a step."""
        if self.adaptive is None:
            return
        newest, measured = self.noted
        prompts = [(*key[:3], *key[4:]) for key in keys]  # whatever the size of the latents
        measured = measured or next((prompt for prompt in prompts if prompt[0] == 0), None)
        if measured in prompts and index > newest:
            self.adaptive.note(self.steps[index], output.chunk(len(keys))[prompts.index(measured)].float())
            self.noted = index, measured


NAMES: dict[Branch, str] = {"cond": "positive", "uncond": "negative"}
