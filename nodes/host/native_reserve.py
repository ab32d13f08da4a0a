"""What a step cache keeps of a forward of ComfyUI's own Wan models, what stands in for a skipped one, and how many
bytes that takes, known before the run begins.

Every condition keeps residuals of its own, of each of its context windows, if it runs in a step whose residual is used
later. Skip-layer guidance runs conditions a second time, or in another way: those are kept apart.

Legend: B batch, L tokens, C channels, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import getclosurevars
from math import ceil, inf, isclose, nan, prod
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from wan_core.sampling.cache.residual import Residuals, joined, keep_after, keep_before, residual_program
from wan_core.sampling.steps import Step

from .native_beside import apart, pause

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
    """For a function that keeps tensors for later forwards."""

    @eager
    @functools.wraps(function)
    def keep(*args: Any) -> Any:
        with pause():
            return function(*args)

    return cast(Function, keep)


@eager
def reuse(states: Sequence[Residuals], step: int) -> Tensor:
    """The output of a skipped step, without the model."""
    return joined([state.reused(step) for state in states])


@uncompiled
def keep_output(
    forward: Forward, states: Sequence[Residuals], step: int, options: dict[str, Any], blocks: int
) -> Tensor:
    output = forward(options)
    keep_rows(states, step, output)
    return output


@lasting
def keep_rows(states: Sequence[Residuals], step: int, output: Tensor) -> None:
    for state, rows in zip(states, output.chunk(len(states)), strict=True):
        if (slot := state.slot(step, rows)) is not None:
            slot.copy_(rows)
            state.filled(step)


@eager
def add_reused(states: Sequence[Residuals], step: int, tokens: Tensor) -> Tensor:
    rows = zip(states, tokens.chunk(len(states)), strict=True)
    return joined([state.reused(step, part) for state, part in rows])


@uncompiled
def reuse_blocks(
    forward: Forward, states: Sequence[Residuals], step: int, options: dict[str, Any], blocks: int
) -> Tensor:
    """The first block adds what all of them added, the others nothing."""

    def first(args: dict[str, Any], run: Any) -> dict[str, Any]:
        return {"img": add_reused(states, step, args["img"])}

    for block in range(blocks):
        options = around(options, block, first if block == 0 else lambda args, run: {"img": args["img"]})
    with apart(options, "reuse"):  # pyright: ignore[reportCallIssue] # torch types what it disables as its own class
        return forward(options)


@uncompiled
def keep_blocks(
    forward: Forward, states: Sequence[Residuals], step: int, options: dict[str, Any], blocks: int
) -> Tensor:
    """Keeps the tokens before the first block and what the last has made of them, where the program of a state has a
    slot for the step. Where none has, the hooks are the same: compiled code of both is one."""
    slots: list[Tensor | None] = []

    def first(args: dict[str, Any], run: Any) -> dict[str, Any]:
        slots[:] = lasting(keep_before)(list(zip(states, args["img"].chunk(len(states)), strict=True)), step)
        return run(args)

    def last(args: dict[str, Any], run: Any) -> dict[str, Any]:
        output = run(args)
        lasting(keep_after)([(state, output["img"]) for state in states], slots, step, output["img"])
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


AGAIN, INSTEAD = "SkipLayerGuidanceDiT.", "SkipLayerGuidanceDiTSimple."  # ComfyUI's functions have names that begin so
REFERENCES = ("SCAILWanModel", "SCAIL2WanModel")  # variants with all reference latents and poses among their tokens
Range = tuple[float, float]
"""The highest and the lowest sigma."""


@dataclass(frozen=True)
class Prompt:
    """A condition, as a CONDITIONING socket has it, that the model runs at sigmas in `inside` and not in `outside`."""

    name: str  # of the list that it is in
    condition: Mapping[str, Any]
    place: int = 0  # in its list
    count: int = 1  # of the prompts in it
    inside: tuple[Range, ...] = ()
    outside: tuple[Range, ...] = ()
    replaced: bool = False  # blocks are replaced: kept from the second of its steps on, and dropped after the last

    def runs(self, sigma: float) -> bool:
        inside, outside = ([low <= sigma <= high for high, low in several] for several in (self.inside, self.outside))
        return all(inside) and not any(outside)


def running(guider: Any, both: bool = False) -> tuple[str, ...]:
    """Which of a guider's conditions the model runs: ComfyUI leaves out those that a scale of 1 takes no part of.

    both: the sampler asks for those too."""

    def is_one(name: str) -> bool:
        return isclose(getattr(guider, name, nan), 1.0)

    if hasattr(guider, "cfg2"):  # DualCFGGuider
        unused = [] if guider.nested or not is_one("cfg2") else ["negative", *["middle"] * is_one("cfg1")]
    elif hasattr(guider, "neg_scale"):  # PerpNegGuider
        unused = [] if guider.neg_scale else ["negative", *["empty_negative_prompt"] * is_one("cfg")]
    else:
        unused = ["negative"] * is_one("cfg")
    if both or guider.model_options.get("disable_cfg1_optimization", False):
        unused = []
    return tuple(name for name in guider.conds if name not in unused)


def prompts_of(guider: Any, names: Sequence[str]) -> list[Prompt]:
    """What keeps residuals of its own, of the conditions with `names`."""
    from comfy.samplers import calculate_start_end_timesteps

    sampling = SimpleNamespace(model_sampling=guider.model_patcher.get_model_object("model_sampling"))
    prompts: dict[str, list[Prompt]] = {}
    for name in names:
        timed = list(guider.conds[name])
        calculate_start_end_timesteps(sampling, timed)
        ends = [((one.get("timestep_start", inf), one.get("timestep_end", -inf)),) for one in timed]
        prompts[name] = [Prompt(name, one, n, len(timed), ends[n]) for n, one in enumerate(timed)]
    guided = "middle" if hasattr(guider, "cfg2") and not guider.nested else "positive"
    more = list[Prompt]()
    for sigmas in skip_layer_ranges(guider.model_options):
        more += [replace(one, inside=(*one.inside, sigmas), replaced=True) for one in prompts.get(guided, ())]
    for sigmas in _ranges([guider.model_options.get("sampler_calc_cond_batch_function")], INSTEAD):
        negative = prompts.get("negative", [])
        more += [replace(one, inside=(*one.inside, sigmas), replaced=True) for one in negative]
        negative[:] = [replace(one, outside=(*one.outside, sigmas)) for one in negative]
    return [*(one for several in prompts.values() for one in several), *more]


def skip_layer_ranges(model_options: Mapping[str, Any]) -> list[Range]:
    """Where ComfyUI's skip-layer guidance on a MODEL runs prompts a second time."""
    return list(_ranges(model_options.get("sampler_post_cfg_function", ()), AGAIN))


def _ranges(functions: Iterable[Any], name: str) -> Iterator[Range]:
    for function in functions:
        if getattr(function, "__qualname__", "").startswith(name):
            settings = getclosurevars(function).nonlocals
            if settings.get("scale", 1.0) > 0:
                yield settings["sigma_start"], settings["sigma_end"]


def kept_bytes(
    phases: Iterable[Sequence[Step]],
    prompts: Sequence[Prompt],
    transformer: Any,
    blocks: bool,
    shape: Sequence[int],
    itemsize: int,
    model_options: Mapping[str, Any],
) -> int:
    """The most that residuals take in any of `phases`, the steps of an expert, in each of which all are kept.

    blocks: they are those of the blocks; otherwise outputs of the whole model. shape: of the latents, [B, C, T, Y, X].
    """
    most, before = 0, nan
    windows = windows_of(shape, model_options)
    for phase in phases:
        program, residual_counts = residual_program(phase, "cond"), dict[int, int]()
        for step in phase:
            for n, prompt in enumerate(prompts):
                now, earlier = prompt.runs(step.sigma), prompt.runs(before)
                if prompt.replaced and not (now or earlier):
                    residual_counts.pop(n, None)
                if now and step.index in program.store and (earlier or not prompt.replaced):
                    residual_counts[n] = sum(numbers_kept(transformer, blocks, one, shape, prompt) for one in windows)
            most, before = max(most, program.slots * sum(residual_counts.values()) * itemsize), step.sigma
    return most


def numbers_kept(transformer: Any, blocks: bool, window: Window, size: Sequence[int], prompt: Prompt) -> int:
    """What a slot has of a prompt in a window of latents of this size."""
    if not window.has(prompt):
        return 0
    if not blocks:
        return prod(window.size(size))
    return size[0] * tokens_seen(transformer, window, size, prompt.condition) * transformer.dim


@dataclass(frozen=True)
class Window:
    """What a forward sees of latents of a size: all of them, or one of ComfyUI's context windows."""

    frames: Any = None  # ComfyUI's own window
    full: int = 0  # how long the latents are where they are cut
    shares: bool = False  # prompts of one list are shared out among windows

    def has(self, prompt: Prompt) -> bool:
        return not self.shares or self.frames.get_region_index(prompt.count) == prompt.place

    def size(self, size: Sequence[int]) -> list[int]:
        """The part of latents of this size that is in the window; all where they are not as long as the video's."""
        if self.frames is None or len(size) <= self.frames.dim or size[self.frames.dim] != self.full:
            return list(size)
        return list(self.frames.get_tensor(torch.empty(tuple(size), device="meta")).shape)


def windows_of(size: Sequence[int], model_options: Mapping[str, Any]) -> list[Window]:
    """The context windows of latents of this size, the same in every step."""
    handler = model_options.get("context_handler")
    if handler is None or size[handler.dim] <= handler.context_length:
        return [Window()]
    windows = handler.get_context_windows(None, torch.empty(tuple(size), device="meta"), model_options)
    for window in windows if getattr(handler, "causal_window_fix", False) else ():  # not before 0.33
        window.causal_anchor_index = window.index_list[0] - 1
    return [Window(one, size[handler.dim], getattr(handler, "split_conds_to_windows", False)) for one in windows]


def tokens_seen(transformer: Any, window: Window, size: Sequence[int], condition: Mapping[str, Any]) -> int:
    """Tokens of a video of latents [B, C, T, Y, X] in the blocks, with those that a condition adds to them."""
    variant, patch = type(transformer).__name__, transformer.patch_size
    references, more = condition.get("reference_latents") or [], list[Tensor]()
    if variant == "WanModel":
        more = list(condition.get("context_latents") or [])
        if transformer.ref_conv is not None:
            more += [one[:, :, :1] for one in references[-1:]]
    elif variant == "HumoWanModel":
        more = references[-1:]
    elif variant in REFERENCES:
        more = [*references, condition.get("pose_video_latent")]
    more = [one for one in (*more, condition.get("time_dim_concat")) if one is not None]
    sizes = [window.size(one) for one in (size, *(one.shape for one in more))]
    return sum(prod(ceil(n / p) for n, p in zip(one[2:], patch, strict=True)) for one in sizes)
