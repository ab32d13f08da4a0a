"""The resolution schedule on ComfyUI's own Wan models, through documented hooks alone.

`Stages` is a wrapper around a sampling run (`WrappersMP.OUTER_SAMPLE`): all that stays on the model are its options. It
hooks a `StagedRun` into the options of this run, a wrapper around a forward (`WrappersMP.APPLY_MODEL`), which gets a
noisy sample and returns the video that is predicted of it. The sampler sees latents of one size all along, so every
sampler goes with it. `wan_core.sampling.resolution` has the mathematics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key
from torch import Tensor

from wan_core.config import OptionError, StageOptions
from wan_core.sampling.native.run import FORWARD, RUN, SCALE, NativeForward
from wan_core.sampling.resolution import SmallerSize
from wan_core.sampling.schedules import shifted
from wan_core.sampling.stages import check_end, stage_at, stage_words

from .native import conditions_of
from .native_beside import Patches, apart
from .native_model import describe
from .native_reserve import eager

# Of what a forward gets beside the noisy latents: channels beside them, which get their size, and what has none.
FOLLOWING = ("c_concat", "c_crossattn", "clip_fea")
# Functions around or in a forward that take latents or tokens of any size, by the key of a wrapper and by the first
# part of the name of a patch. Uni3C encodes its video again where the size changes.
WRAPPERS = ("torch.compile", "wancore")
PATCHES = ("NAGuidance", "PerturbedAttentionGuidance", "SkipLayerGuidance", "WanUni3CCnetPatch")
NODES = {  # by how the names of what they add begin
    "MultiTalk": "InfiniteTalk, which puts frames and masks of the full size into each step",
    "easycache": "EasyCache, which skips every step after a change of size",
}
REMEDY = "leave out the nodes that add it, or disconnect WanCore Resolution Schedule"


def check_sampling(patcher: ModelPatcher, stages: Sequence[StageOptions]) -> None:
    """Raise OptionError where samples are no mixture of the video and noise of variance 1, and for positions that this
    version of ComfyUI cannot set."""
    sampling = patcher.get_model_object("model_sampling")
    kind, scale = type(sampling), getattr(sampling, "noise_scale", 1.0)
    from comfy.model_sampling import CONST

    same = isinstance(sampling, CONST) and all(
        getattr(kind, name) is getattr(CONST, name) for name in ("calculate_denoised", "noise_scaling")
    )
    if not same or scale != 1:
        sampling_name = ", ".join(base.__name__ for base in kind.__bases__) + f" with noise scale {scale:g}" * (
            scale != 1
        )
        raise OptionError(
            f"a resolution schedule needs the flow sampling that Wan is trained with, and this model has "
            f"{sampling_name}: remove the node that sets it, or disconnect WanCore Resolution Schedule"
        )
    rope = inspect.signature(patcher.model.diffusion_model.rope_encode).parameters
    if "transformer_options" not in rope and any(stage.positions == "video" for stage in stages):
        raise OptionError(
            "this version of ComfyUI does not set the positions of Wan's tokens: choose positions 'own' in WanCore "
            "Resolution Schedule, or update ComfyUI"
        )


def check_run(conditions: Iterable[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
    """Raise OptionError for what would keep its size in the smaller steps of a run.

    conditions: of all prompts, encoded. options: the transformer_options of the run."""
    for condition in conditions:
        check_inputs({**condition["model_conds"], "control": condition.get("control")})
    wrappers, replaced = options.get("wrappers", {}), options.get("patches_replace", {})
    hooks = [
        wrapper
        for kind in (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
        for key, several in wrappers.get(kind, {}).items()
        for wrapper in several
        if not str(key).startswith(WRAPPERS)
    ]
    patches = [*options.get("patches", {}).values(), *(placed.values() for placed in replaced.values())]
    hooks += [patch for several in patches for patch in several if not name_of(patch).startswith(PATCHES)]
    if hooks:
        raise OptionError(
            "a resolution schedule does not know whether its smaller steps suit "
            f"{', '.join(sorted({words_of(hook) for hook in hooks}))}: {REMEDY}"
        )


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise OptionError for what a forward gets that has a size and would keep it."""
    unknown = [name for name, value in inputs.items() if value is not None and name not in FOLLOWING]
    if unknown:
        raise OptionError(f"a resolution schedule does not change the size of {', '.join(unknown)}: {REMEDY}")


def name_of(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def words_of(hook: Callable[..., Any]) -> str:
    """What a user knows a function of another node by."""
    name = name_of(hook)
    return next(
        (description for begins, description in NODES.items() if name.startswith(begins)),
        f"{name} of {hook.__module__}",
    )


KEY = "wancore_stages"


class Stages:
    """Put on a model by `attach_stages`; called around every sampling run."""

    def __init__(self, stages: Sequence[StageOptions], report: Callable[[str], None]) -> None:
        """report: called after every run, with what was done in words."""
        self.stages, self.report = tuple(stages), report

    def __call__(
        self,
        executor: Any,
        noise: Tensor,
        latent_image: Tensor,
        sampler: Any,
        sigmas: Tensor,
        *rest: Any,
        **keywords: Any,
    ) -> Any:
        guider = executor.class_obj
        hooks = guider.model_options["transformer_options"]
        report = hooks[RUN].notes.append if RUN in hooks else self.report  # one text for all that a node does
        begins = sigmas[:-1].tolist()
        if not begins:  # a schedule that is split may have a part without a step
            return executor(noise, latent_image, sampler, sigmas, *rest, **keywords)
        if float(sigmas[-1]) == 0:
            check_end(begins, self.stages)
        check_sampling(guider.model_patcher, self.stages)
        run = StagedRun(self.stages, begins, describe(guider.model_patcher).boundary, Patches(hooks))
        add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, run, guider.model_options, is_model_options=True)
        add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, check_sizes, guider.model_options, is_model_options=True)
        try:
            return executor(noise, latent_image, sampler, sigmas, *rest, **keywords)
        finally:
            run.videos.clear()
            run.patches.seen.clear()
            summary = f"{run.small} of {run.forwards} forwards at a smaller size"
            report(f"resolution schedule ({stage_words(self.stages)}): {summary}")


def check_sizes(
    executor: Any, guider: Any, sigmas: Tensor, arguments: dict[str, Any], *rest: Any, **keywords: Any
) -> Any:
    """Around a sampler, whose conditions are encoded by now, within the wrappers of all other nodes."""
    conditions = (condition for several in guider.conds.values() for condition in several)
    check_run(conditions, arguments["model_options"]["transformer_options"])
    return executor(guider, sigmas, arguments, *rest, **keywords)


class StagedRun:
    """One sampling run. `videos` has the last prediction for every condition, see `conditions_of`, and, under its entry
    in `cond_or_uncond`, the last one for any of them: for a condition, or a second pass with it, that begins in a
    smaller step. Guidance adds up what differs between predictions, so each needs details."""

    def __init__(
        self, stages: Sequence[StageOptions], sigmas: Sequence[float], boundary: float, patches: Patches
    ) -> None:
        """sigmas: where the sampler's steps begin. patches: on the model; of those that are gone nothing is kept."""
        self.stages, self.sigmas, self.boundary, self.patches = stages, sigmas, boundary, patches
        self.videos: dict[tuple[Any, ...], Tensor] = {}
        self.sizes: dict[tuple[Any, ...], SmallerSize] = {}
        self.sigma: tuple[Tensor | None, float] = (None, 0.0)
        self.small = self.forwards = 0

    @eager
    def __call__(
        self,
        executor: Any,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The predicted video [B, C, T, Y, X] of the noisy sample `x`. t [B]: its sigmas."""
        options = {} if transformer_options is None else transformer_options
        check_inputs({"control": control, **kwargs})
        if self.sigma[0] is not options["sigmas"]:  # read from the device once for each evaluation
            self.sigma = options["sigmas"], float(options["sigmas"][0])
        sigma = self.sigma[1]
        self.patches.enter(sigma, options)
        self.videos = {key: one for key, one in self.videos.items() if len(key) == 4 or key[-1] in self.patches.seen}
        keys, stage = conditions_of(x, options), stage_at(sigma, self.stages, self.sigmas)
        self.forwards += len(keys)
        if stage is None:
            video = executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
        else:
            self.small += len(keys)
            size = self.size(stage.scale, x, executor.class_obj.diffusion_model.patch_size[1:])
            sample, model_sigma = size.sample(x.float(), sigma), self.told(sigma, stage.scale)
            concat = None if c_concat is None else (size.down(c_concat.float()) / size.ratio).to(c_concat)
            options = {**options, SCALE: stage.scale}
            if FORWARD in options:  # says the size of the video
                options[FORWARD] = at_size(options[FORWARD], size)
            if stage.positions == "video":
                options["rope_options"] = rope_options(size, options.get("rope_options"))
            inputs = sample.to(x), torch.full_like(t, model_sigma), concat, c_crossattn, control, options
            with apart(options, ("stage", *options.get("rope_options", {}).values())):
                predicted = executor(*inputs, **kwargs).float()
            velocity, before = (sample - predicted) / model_sigma, [self.before(key) for key in keys]
            previous = None if any(one is None for one in before) else torch.cat(before)  # type: ignore[arg-type]
            video = size.video(sample, velocity, sigma, previous).to(x)
        for key, part in zip(keys, video.float().chunk(len(keys)), strict=True):
            self.videos[key] = self.videos[entry_of(key)] = part
        return video

    def before(self, key: tuple[Any, ...]) -> Tensor | None:
        """The last prediction for a condition, or for another one in its place; None for none."""
        return self.videos.get(key, self.videos.get(entry_of(key)))

    def told(self, sigma: float, scale: float) -> float:
        """The sigma that the model is told, as `wan_core.sampling.stages.at_stage` has it."""
        seen = shifted(sigma, scale)
        return max(seen, self.boundary) if sigma >= self.boundary else seen

    def size(self, scale: float, x: Tensor, patch: tuple[int, int]) -> SmallerSize:
        key = scale, tuple(x.shape[3:]), x.device
        if key not in self.sizes:
            self.sizes[key] = SmallerSize.of((x.shape[3], x.shape[4]), scale, patch, x.device)
        return self.sizes[key]


def entry_of(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A condition without what tells it from others in the same place: uuid and patches."""
    entry, _, window, size, device, _ = key
    return entry, window, size, device


def rope_options(size: SmallerSize, whole: dict[str, float] | None) -> dict[str, float]:
    """Rotary options for ComfyUI's Wan models: a token lies in the middle of the area that it replaces. whole: the
    options of the video's own size (ScaleROPE), in which token n of an axis is at shift + n * scale."""
    scales_and_shifts = {**(whole or {})}
    for axis, spacing in zip("yx", size.spacing, strict=True):
        scale = scales_and_shifts.get(f"scale_{axis}", 1.0)
        scales_and_shifts[f"shift_{axis}"] = scales_and_shifts.get(f"shift_{axis}", 0.0) + scale * (spacing - 1) / 2
        scales_and_shifts[f"scale_{axis}"] = scale * spacing
    return scales_and_shifts


def at_size(forward: NativeForward, size: SmallerSize) -> NativeForward:
    frames, *sides = forward.grid
    rows, columns = (round(side / apart) for side, apart in zip(sides, size.spacing, strict=True))
    return replace(forward, grid=(frames, rows, columns))


def attach_stages(patcher: ModelPatcher, stages: Stages | None) -> None:
    """Put `stages` on a clone of a model, in place of those that are there; None takes them away. Raises
    OptionError."""
    native = describe(patcher)
    if stages is not None and (not native.stages):
        raise OptionError(
            f"{native.name} takes inputs whose size a resolution schedule does not change: disconnect WanCore "
            "Resolution Schedule"
        )
    patcher.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    if stages is not None:
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, stages)


def stages_of(patcher: ModelPatcher) -> tuple[StageOptions, ...]:
    """The resolution schedule of a model."""
    stages = next(iter(patcher.wrappers.get(WrappersMP.OUTER_SAMPLE, {}).get(KEY, [])), None)
    return () if stages is None else stages.stages
