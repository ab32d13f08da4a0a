"""Sampling runs of ComfyUI's own Wan models with WanCore Accelerate: one policy on the MODEL, one plan for each run.

`Accelerated` is a wrapper around a sampling run (`WrappersMP.OUTER_SAMPLE`): all that stays on the model are its
options. It makes the plan of the run, by which attention is sparse and forwards are skipped, and hooks what carries it
out into the options of this run, which ComfyUI drops at its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key
from torch import Tensor

from wan_core.config import EXACT, OptionError, SkipOptions, SparseOptions
from wan_core.ops.attention.registry import CHOSEN
from wan_core.ops.cards import capability
from wan_core.pipeline.memory_planning import slope_factor
from wan_core.sampling.build import SamplerRequest, build_sampler_plan
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.native.attention import NativeAttention
from wan_core.sampling.native.plan import Part, check_native, falls, place, rising_words
from wan_core.sampling.native.run import RUN, WARNING, NativeRun
from wan_core.sampling.native.summary import advice_for, missing_kernels, report_text
from wan_core.sampling.next_speed import next_speed
from wan_core.sampling.plan import Plan
from wan_core.sampling.schedules import find_part
from wan_core.sampling.sparsity.schedule import attention_share, with_costs
from wan_core.sampling.steps import Branch

from .native import checkpoint_of, compute_dtype, run_forward, tokens_of, uncompiled_model, with_room
from .native_beside import (
    OVERRIDE,
    check_conditions,
    check_sparse,
    check_step_cache,
    is_compiled,
    pause,
    split_earlier,
    words_after,
)
from .native_cache import CachedRun
from .native_model import STATEFUL, describe, window_schedule
from .native_reserve import running

Planned = Callable[[SkipOptions], tuple[Plan, Part]]
KEY = "wancore_accelerate"
COMPARED_FROM = 10  # steps: in shorter runs a step of ComfyUI's own costs most of what is gained
BOTH: tuple[Branch, ...] = ("cond", "uncond")
# Of models with which a run was compared, the shapes of latents: by file, which ComfyUI may load again for every prompt
# (--cache-none), and by model where the file is not known.
_compared_files: defaultdict[Path, set[tuple[int, ...]]] = defaultdict(set)
_compared: WeakKeyDictionary[torch.nn.Module, set[tuple[int, ...]]] = WeakKeyDictionary()


def accelerate(
    model: ModelPatcher,
    attention: str,
    options: SkipOptions,
    report: Callable[[str], None],
    whole_steps: int = 0,
    compare: str = "off",
) -> ModelPatcher:
    """A clone of `model` whose self-attention is ours, and which skips what `options` say. attention: as for
    `NativeAttention`. report: called after every sampling run, with what was accelerated in words. whole_steps: of the
    run of which a sampler walks a part; 0: not known. compare: 'on': the last step is ComfyUI's own, and the report has
    its time; 'auto': once for a model and a size, in runs of `COMPARED_FROM` steps and more. Raises OptionError."""
    from comfy.ldm.modules.attention import optimized_attention

    check_native(options)
    check_sparse(model, options.sparse)
    caches = replace(options, sparse=None) != SkipOptions()
    if caches and (variant := describe(model).variant) in STATEFUL:
        raise OptionError(
            f"{variant} keeps state between its forwards, so none can be skipped: set speed to 'exact' and leave out "
            "the step cache"
        )
    if options.taylorseer:
        check_step_cache(model.model_options["transformer_options"])
    clone = model.clone()
    hooks = clone.model_options["transformer_options"]
    earlier = split_earlier(hooks.get(OVERRIDE))
    override = hooks[OVERRIDE] = NativeAttention(attention, **earlier, original=optimized_attention, pause=pause)
    ours = {
        WrappersMP.OUTER_SAMPLE: Accelerated(override, options, report, whole_steps, compare),
        WrappersMP.APPLY_MODEL: partial(run_forward, override),
    }
    for kind, wrapper in ours.items():
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    return clone


def accelerated(patcher: ModelPatcher) -> Accelerated | None:
    """What WanCore Accelerate put on a model."""
    return next(iter(patcher.wrappers.get(WrappersMP.OUTER_SAMPLE, {}).get(KEY, [])), None)


class Accelerated:
    """Called around every sampling run of one model."""

    def __init__(
        self,
        override: NativeAttention,
        options: SkipOptions,
        report: Callable[[str], None],
        whole_steps: int,
        compare: str,
    ) -> None:
        self.override, self.options, self.report = override, options, report
        self.whole_steps, self.compare = whole_steps, compare
        self.pace: list[float] = []  # seconds of a forward in the last run that skipped some

    def __call__(
        self,
        executor: Any,
        noise: Tensor,
        latent: Tensor,
        sampler: Any,
        sigmas: Tensor,
        denoise_mask: Tensor | None = None,
        callback: Callable[..., None] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        guider = executor.class_obj
        check_conditions(guider.conds)
        hooks = guider.model_options["transformer_options"]  # this run's own copy
        planned = partial(self._planned, guider, sampler, sigmas.tolist(), denoise_mask is not None)
        run, plan = self._begin(guider, planned, sigmas.tolist(), noise.shape)
        hooks[RUN] = run
        # Here, so that what asks for memory comes after a context windows node's, which says the size of one window.
        if run.sparse is not None:
            prepare = partial(_prepare, run.sparse)
            add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, prepare, guider.model_options, is_model_options=True)
        cache = None
        if plan is not None and any(step.skipped for step in plan.steps):
            check_step_cache(hooks)
            cache = CachedRun(guider, plan, run.part, noise.shape, self._branches(guider, sampler))
        if not is_compiled(hooks):  # a compiler fuses by itself
            from .native_blocks import run_fused

            fuse = partial(run_fused, run)
            add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, fuse, guider.model_options, is_model_options=True)

        wait = partial(wait_for, guider.model_patcher.load_device)

        def stepped(step: int, *arguments: Any) -> None:
            run.pass_step(step, wait)
            if callback is not None:
                callback(step, *arguments)

        try:
            result = executor(noise, latent, sampler, sigmas, denoise_mask, stepped, *args, **kwargs)
        finally:
            if cache is not None:
                run.note(f"step cache ({skip_words(replace(self.options, sparse=None))}): {cache.finish(self.pace)}")
                run.skipped = cache.reused, cache.forwards
        wait()
        run.end()
        self._end(guider, run, plan, noise.shape, planned)
        return result

    def _branches(self, guider: Any, sampler: Any) -> tuple[str, ...]:
        """The names of the prompts that run."""
        return running(guider, solver_of(sampler).endswith("_cfg_pp"))

    def _planned(
        self, guider: Any, sampler: Any, sigmas: list[float], image: bool, options: SkipOptions
    ) -> tuple[Plan, Part]:
        """The plan of a run with `options`, and where it is in the whole run. image: it starts from one (5B)."""
        names = self._branches(guider, sampler)
        request = SamplerRequest(
            sigmas=tuple(sigmas),
            whole_steps=self.whole_steps,
            solver=solver_of(sampler),
            guidance=guider.cfg if names[1:] else 1.0,
            branches=BOTH if names[1:] else BOTH[:1],
            skip=options,
            windows=window_schedule(guider.model_options),
            image=image,
        )
        return build_sampler_plan(request, describe(guider.model_patcher))

    def _begin(
        self, guider: Any, planned: Planned, sigmas: list[float], shape: Sequence[int]
    ) -> tuple[NativeRun, Plan | None]:
        """The run of a sampler and its plan; None where nothing is left out. Raises OptionError."""
        plan, sparsities = None, ()
        if self.options != SkipOptions() and len(sigmas) > 1:
            plan, part = planned(self.options)
            if plan.sparse is not None:
                sparsities = (*(0.0 for _ in range(part.first)), *(step.sparsity for step in plan.steps))
        else:
            shift = getattr(guider.model_patcher.get_model_object("model_sampling"), "shift", 1.0)
            known = self.whole_steps and falls(sigmas)
            part = place(sigmas, shift, self.whole_steps) if known else find_part(sigmas, shift)
        open_question = self.compare == "auto" and tuple(shape) not in compared_shapes(guider.model_patcher)
        now = self.compare == "on" or (open_question and part.total >= COMPARED_FROM)
        run = NativeRun(part, sparsities, now, None if plan is None else plan.sparse)
        run.offers = open_question and not now
        check_sparse(guider.model_patcher, run.sparse)
        if self.options.taylorseer:
            notes = [rising_words(sigmas)] if plan is None else plan.notes
            if plan is None or not any(step.skipped for step in plan.steps):
                run.note("; ".join([f"{WARNING}step cache: every step is computed", *notes]))
        return run, plan

    def _next(self, patcher: ModelPatcher, run: NativeRun, shape: Sequence[int], planned: Planned) -> str:
        """What the next word of speed would save of a run, see `next_speed`; empty where settings are one's own."""
        if replace(self.options, speed=EXACT) != SkipOptions() or run.part.steps < 2:
            return ""
        config = describe(patcher).config

        def at(word: str) -> Plan:
            return with_costs(planned(SkipOptions(speed=word))[0], config, tuple(shape[2:]))

        with suppress(OptionError):  # of a word that does not fit this model or sampler
            plan = at(self.options.speed)
            timed = plan.steps[:-1] if run.before else plan.steps  # without the step that was compared
            each = (run.seconds - run.before) / max(1.0, sum(step.forwards * step.cost for step in timed))
            return next_speed(plan, self.options.speed, at, dict.fromkeys(plan.experts, each))
        return ""

    def _end(self, guider: Any, run: NativeRun, plan: Plan | None, shape: Sequence[int], planned: Planned) -> None:
        """Report what was accelerated."""
        patcher = guider.model_patcher
        if run.before:
            compared_shapes(patcher).add(tuple(shape))
        for note in () if plan is None else plan.notes:
            if not any(note in other for other in run.notes):
                run.note(note)
        run.notes += words_after(patcher, guider.model_options["transformer_options"], run)
        dit = uncompiled_model(patcher.model.diffusion_model)
        card = capability(patcher.load_device)
        kernels = missing_kernels(card) if self.override.attention in CHOSEN else []
        each = patcher.model_size() / sum(one.numel() for one in dit.parameters())
        share = attention_share(dit, tokens_of(dit, shape))
        advice = self._next(patcher, run, shape, planned), advice_for(run, kernels, card, each)
        self.report(report_text(run, share, "; ".join(filter(None, advice))))


def compared_shapes(patcher: ModelPatcher) -> set[tuple[int, ...]]:
    """The shapes of latents with which a run of a model was compared, to be added to."""
    path = checkpoint_of(patcher)
    return _compared.setdefault(patcher.model, set()) if path is None else _compared_files[path]


def wait_for(device: torch.device) -> None:
    """For what is queued on a model's device, which need not be the current one (Select Model Device)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def solver_of(sampler: Any) -> str:
    """The name of a SAMPLER's function, as ComfyUI lists it."""
    return getattr(getattr(sampler, "sampler_function", None), "__name__", "sampler").removeprefix("sample_")


def _prepare(
    sparse: SparseOptions | None, executor: Any, model: Any, shape: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    """A wrapper of PREPARE_SAMPLING: ComfyUI frees memory for the slopes of sparse attention too."""
    dit = model.model.diffusion_model
    factor = slope_factor(dit.num_heads, dit.dim // dit.num_heads, sparse)
    nbytes = int(factor * tokens_of(dit, shape) * dit.dim) * compute_dtype(model).itemsize
    return executor(model, with_room(shape, model, nbytes), *args, **kwargs)
