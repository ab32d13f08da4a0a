"""Hooks into Wan models that ComfyUI runs itself: its attention override and wrappers, on a clone of the MODEL.

Nothing of ComfyUI is replaced. The state of a sampling run is in the options that ComfyUI copies for each sampler. It
ends with the sampler, also when that is interrupted or runs out of memory.

Legend: B batch, C channels, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from wan_core.config import OptionError
from wan_core.sampling.native.attention import NativeAttention
from wan_core.sampling.native.run import FORWARD, RUN, NativeForward, NativeRun

from .native_beside import OVERRIDE, apart, ids_of, patches_of

# Models that may have tokens beside those of the video, in places that are known: before them Fun's reference and
# SCAIL's reference frames, which are in its `grid_sizes` too, all others behind.
REFERENCE_FRAMES = ("SCAILWanModel", "SCAIL2WanModel")
EXTRA_TOKENS = ("WanModel", "WanModel_S2V", "HumoWanModel", *REFERENCE_FRAMES)


def check_wan(model: ModelPatcher) -> Any:
    """The transformer of a Wan model. Raises OptionError for others."""
    from comfy.ldm.wan.model import WanModel

    transformer = model.model.diffusion_model
    if not isinstance(transformer, WanModel):
        raise OptionError(
            f"WanCore Accelerate takes Wan models, this is {type(model.model).__name__}: connect a Wan model"
        )
    return transformer


def compute_dtype(model: ModelPatcher) -> torch.dtype:
    """What the transformer computes in, with what ModelComputeDtype puts on a MODEL for its runs."""
    return model.get_model_object("manual_cast_dtype") or model.model.get_dtype()


def checkpoint_of(model: ModelPatcher) -> Path | None:
    """The file that ComfyUI's own loader read the model from; None where it does not say."""
    loader_call = getattr(model, "cached_patcher_init", None)  # not before 0.33
    path = loader_call[1][0] if loader_call and loader_call[1] else None
    return Path(path) if isinstance(path, str) else None


def tokens_of(dit: Any, shape: Sequence[int]) -> int:
    """Number of tokens of ComfyUI's transformer for latents of `shape` [B, C, T, Y, X]."""
    return shape[0] * prod(ceil(n / p) for n, p in zip(shape[2:], dit.patch_size, strict=True))


def with_room(shape: Sequence[float], model: ModelPatcher, extra_bytes: int) -> list[float]:
    """The shape [B, C, T, Y, X] of latents for which ComfyUI frees `extra_bytes` more than for `shape`, with guidance's
    two branches in one batch. T is a part of a frame more: a whole one of 720p stands for more than a GiB."""
    needed = model.model.memory_required([shape[0] * 2, *shape[1:]])
    return [*shape[:2], shape[2] * (1 + extra_bytes / needed), *shape[3:]]


def run_forward(
    override: NativeAttention,
    executor: Any,
    x: Tensor,
    t: Tensor,
    c_concat: Tensor | None = None,
    c_crossattn: Tensor | None = None,
    control: Any = None,
    transformer_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Around a forward: says what it is, in its options."""
    options = {} if transformer_options is None else transformer_options
    run = options.get(RUN)
    if run is not None and x.ndim == 5:
        forward = describe(run, uncompiled_model(executor.class_obj.diffusion_model), x, kwargs)
        options[FORWARD] = replace(forward, text=0 if c_crossattn is None else c_crossattn.shape[1])
        run.begin()
        run.outer = None if options.get(OVERRIDE) is override else options.get(OVERRIDE)
    hooks = tuple(options.get("wrappers", {}).get(WrappersMP.DIFFUSION_MODEL, {}))
    with apart(options, ("attention", *hooks)):
        return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)


def uncompiled_model(transformer: Any) -> Any:
    """What torch.compile was called with: a torch compile node puts its result in the place of the transformer."""
    return getattr(transformer, "_orig_mod", transformer)


def describe(run: NativeRun, transformer: Any, x: Tensor, conditions: dict[str, Any]) -> NativeForward:
    """x [B, C, T, Y, X]: latents of a forward. conditions: what the model gets beside them."""
    patch = transformer.patch_size
    sizes = list(x.shape[2:])
    if conditions.get("time_dim_concat") is not None:
        sizes[0] += conditions["time_dim_concat"].shape[2]
    grid = tuple(-(-size // each) for size, each in zip(sizes, patch, strict=True))
    reference, front = conditions.get("reference_latent"), 0
    if reference is not None and type(transformer).__name__ in REFERENCE_FRAMES:
        front = -(-reference.shape[2] // patch[0]) * grid[1] * grid[2]
    elif reference is not None and getattr(transformer, "ref_conv", None) is not None:
        front = (reference.shape[-2] // patch[1]) * (reference.shape[-1] // patch[2])
    return NativeForward(
        run,
        grid=grid,
        front=front,
        extra=type(transformer).__name__ in EXTRA_TOKENS,
        by_frames=type(transformer).__name__ == "WanAnimate2Model",
    )


def conditions_of(x: Tensor, options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The conditions of a forward with latents `x` [B, C, T, Y, X], as keys of what is kept for later steps: entry in
    `cond_or_uncond`, uuid, context window, size of the latents, device, and the patches in force, which tell two passes
    with one condition apart (SkipLayerGuidanceDiT runs the prompt again without some of the blocks)."""
    entries = options.get("cond_or_uncond", [0])
    window = options.get("context_window")
    shared = (
        None if window is None else tuple(window.index_list),
        (x.shape[0] // len(entries), *x.shape[1:]),
        x.device,
        ids_of(patches_of(options)),
    )
    return [(*pair, *shared) for pair in zip(entries, options.get("uuids", [None] * len(entries)), strict=True)]
