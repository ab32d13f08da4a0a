"""How many numbers a step cache keeps of forwards of ComfyUI's own Wan models, known before the run begins.

Every condition keeps residuals of its own, of each context window, and once more where skip-layer guidance runs it
without some of the blocks. A condition that runs in a few steps or windows alone is counted like the others.

Legend: B batch, C channels, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import ceil, isclose, nan, prod
from typing import Any

import torch
from torch import Tensor

from wan_core.sampling.cache.residual import residual_program
from wan_core.sampling.steps import Step

from .native import REFERENCE_FRAMES

AGAIN, INSTEAD = "SkipLayerGuidanceDiT.", "SkipLayerGuidanceDiTSimple."  # ComfyUI's functions have names that begin so
Seen = Callable[[Sequence[int]], list[int]]
"""The size of latents -> the part of them that a forward sees: all of it, or what is in a context window."""


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


def prompts_of(guider: Any, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """What keeps residuals of its own, of the conditions with `names`."""
    guided = "middle" if hasattr(guider, "cfg2") and not guider.nested else "positive"
    options = guider.model_options
    again = [guided] * skip_layer_passes(options)
    again += ["negative"] * _count(INSTEAD, [options.get("sampler_calc_cond_batch_function")])
    return [one for name in (*names, *again) if name in names for one in guider.conds[name]]


def skip_layer_passes(model_options: Mapping[str, Any]) -> int:
    """How many more times ComfyUI's skip-layer guidance on a MODEL runs prompts, in the steps of its range."""
    return _count(AGAIN, model_options.get("sampler_post_cfg_function", ()))


def _count(name: str, functions: Iterable[Any]) -> int:
    return sum(getattr(function, "__qualname__", "").startswith(name) for function in functions)


def most_kept(
    phases: Iterable[Sequence[Step]],
    prompts: Sequence[Mapping[str, Any]],
    transformer: Any,
    of_blocks: bool,
    shape: Sequence[int],
    model_options: Mapping[str, Any],
) -> int:
    """The most numbers that residuals have in any of `phases`, the steps of an expert.

    of_blocks: they are those of the blocks; otherwise outputs of the whole model. shape: of the latents.
    """
    slots = max(residual_program(phase, "cond").slots for phase in phases)
    return slots * sum(
        shape[0] * tokens_seen(transformer, seen, shape, prompt) * transformer.dim if of_blocks else prod(seen(shape))
        for seen in windows_of(shape, model_options)
        for prompt in prompts
    )


def windows_of(size: Sequence[int], model_options: Mapping[str, Any]) -> list[Seen]:
    """The context windows of latents of this size, the same in every step."""
    handler = model_options.get("context_handler")
    if handler is None or size[handler.dim] <= handler.context_length:
        return [list]
    windows = handler.get_context_windows(None, torch.empty(tuple(size), device="meta"), model_options)
    for window in windows if getattr(handler, "causal_window_fix", False) else ():  # not before 0.33
        window.causal_anchor_index = window.index_list[0] - 1
    return [partial(_within, one, size[one.dim]) for one in windows]


def _within(window: Any, full: int, size: Sequence[int]) -> list[int]:
    """All of latents that are not as long as the video's, `full`."""
    if len(size) <= window.dim or size[window.dim] != full:
        return list(size)
    return list(window.get_tensor(torch.empty(tuple(size), device="meta")).shape)


def tokens_seen(transformer: Any, seen: Seen, size: Sequence[int], condition: Mapping[str, Any]) -> int:
    """Tokens of a video of latents [B, C, T, Y, X] in the blocks, with those that a condition adds to them."""
    variant, patch = type(transformer).__name__, transformer.patch_size
    references, more = condition.get("reference_latents") or [], list[Tensor]()
    if variant == "WanModel":
        more = list(condition.get("context_latents") or [])
        if transformer.ref_conv is not None:
            more += [one[:, :, :1] for one in references[-1:]]
    elif variant == "HumoWanModel":
        more = references[-1:]
    elif variant in REFERENCE_FRAMES:  # and poses
        more = [*references, condition.get("pose_video_latent")]
    more = [one for one in (*more, condition.get("time_dim_concat")) if one is not None]
    sizes = [seen(one) for one in (size, *(one.shape for one in more))]
    return sum(prod(ceil(n / p) for n, p in zip(one[2:], patch, strict=True)) for one in sizes)
