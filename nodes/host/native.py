"""Hooks into Wan models that ComfyUI runs itself: its attention override and wrappers, on a clone of the MODEL.

Nothing of ComfyUI is replaced. The state of a sampling run is in the options that ComfyUI copies for each sampler. It
ends with the sampler, also when that is interrupted or runs out of memory.

Legend: B batch, C channels, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key
from torch import Tensor

from wan_core.config import OptionError, SparseOptions
from wan_core.config.compile_cache import note_compiled
from wan_core.ops.attention.registry import CHOSEN
from wan_core.ops.cards import capability
from wan_core.pipeline.memory_planning import slope_factor
from wan_core.sampling.native.attention import NativeAttention
from wan_core.sampling.native.plan import WholeRun, falls
from wan_core.sampling.native.run import FORWARD, RUN, NativeForward, NativeRun
from wan_core.sampling.native.summary import advice_for, missing_kernels, report_text
from wan_core.sampling.schedules import find_part
from wan_core.sampling.sparsity.schedule import attention_share, step_sparsities

from .native_beside import (
    OVERRIDE,
    apart,
    check_sparse,
    ids_of,
    patches_of,
    pause,
    split_earlier,
    words_after,
)

KEY = "wancore_accelerate"
COMPARED_FROM = 10  # steps: in shorter runs a step of ComfyUI's own costs most of what is gained
_compared: WeakKeyDictionary[torch.nn.Module, set[tuple[int, ...]]] = WeakKeyDictionary()  # model -> shapes of latents
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


def accelerate(
    model: ModelPatcher,
    attention: str,
    sparse: SparseOptions | None,
    report: Callable[[str], None],
    whole: WholeRun = WholeRun(),  # noqa: B008
    compare: str = "off",
) -> ModelPatcher:
    """A clone of `model` whose self-attention is ours. attention: as for `NativeAttention`. report: called after
    every sampling run, with what was accelerated in words. whole: what is known of the run of which a sampler walks a
    part. compare: 'on': the last step is ComfyUI's own, and the report has its time; 'auto': once for a model and a
    size, in runs of `COMPARED_FROM` steps and more. Raises OptionError."""
    from comfy.ldm.modules.attention import optimized_attention

    check_sparse(model, sparse)
    clone = model.clone()
    options = clone.model_options["transformer_options"]
    override = NativeAttention(
        attention, sparse, **split_earlier(options.get(OVERRIDE)), original=optimized_attention, pause=pause
    )
    options[OVERRIDE] = override

    def sample(executor: Any, noise: Any, latent: Any, sampler: Any, sigmas: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Here, so that it comes after a context windows node's, which says the size of one window.
        own = executor.class_obj.model_options
        add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, prepare, own, is_model_options=True)
        run = partial(_sample, override, sparse, whole, compare, report)
        return run(executor, noise, latent, sampler, sigmas, *args, **kwargs)

    def prepare(executor: Any, model: Any, shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        dit = model.model.diffusion_model
        factor = slope_factor(dit.num_heads, dit.dim // dit.num_heads, sparse)
        nbytes = int(factor * tokens_of(dit, shape) * dit.dim) * compute_dtype(model).itemsize
        return executor(model, with_room(shape, model, nbytes), *args, **kwargs)

    ours = {WrappersMP.OUTER_SAMPLE: sample, WrappersMP.APPLY_MODEL: partial(_apply, override)}
    for kind, wrapper in ours.items():
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    return clone


def tokens_of(dit: Any, shape: Sequence[int]) -> int:
    """Number of tokens of ComfyUI's transformer for latents of `shape` [B, C, T, Y, X]."""
    return shape[0] * prod(ceil(n / p) for n, p in zip(shape[2:], dit.patch_size, strict=True))


def with_room(shape: Sequence[float], model: ModelPatcher, extra_bytes: int) -> list[float]:
    """The shape [B, C, T, Y, X] of latents for which ComfyUI frees `extra_bytes` more than for `shape`, with guidance's
    two branches in one batch. T is a part of a frame more: a whole one of 720p stands for more than a GiB."""
    needed = model.model.memory_required([shape[0] * 2, *shape[1:]])
    return [*shape[:2], shape[2] * (1 + extra_bytes / needed), *shape[3:]]


def _sample(
    override: NativeAttention,
    sparse: SparseOptions | None,
    whole: WholeRun,
    compare: str,
    report: Callable[[str], None],
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
    """Around a whole sampling run of ComfyUI's guider."""
    guider = executor.class_obj
    check_sparse(guider.model_patcher, sparse)
    sampling = guider.model_patcher.get_model_object("model_sampling")
    shift = getattr(sampling, "shift", 1.0)
    own = sigmas.tolist()
    part = whole.place(own, shift) if whole != WholeRun() and falls(own) else find_part(own, shift)
    compared = _compared.setdefault(guider.model_patcher.model, set())
    open_question = compare == "auto" and tuple(noise.shape) not in compared
    now = compare == "on" or (open_question and part.total >= COMPARED_FROM)
    run = NativeRun(part, () if sparse is None else step_sparsities(sparse, part.total), now)
    run.offers = open_question and not now
    options = guider.model_options["transformer_options"]  # this run's own copy
    options[RUN] = run

    def stepped(step: int, *arguments: Any) -> None:
        run.pass_step(step, wait)
        if callback is not None:
            callback(step, *arguments)

    def wait() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    result = executor(noise, latent, sampler, sigmas, denoise_mask, stepped, *args, **kwargs)
    wait()
    run.end()
    compared |= {tuple(noise.shape)} if run.before else set()
    run.notes += words_after(guider.model_patcher, options, run)
    dit = uncompiled_model(guider.model_patcher.model.diffusion_model)
    card = capability(guider.model_patcher.load_device)
    kernels = missing_kernels(card) if override.attention in CHOSEN else []
    each = guider.model_patcher.model_size() / sum(one.numel() for one in dit.parameters())
    share = attention_share(dit, tokens_of(dit, noise.shape))
    note_compiled()
    report(report_text(run, sparse, share, advice_for(run, kernels, card, each)))
    return result


def _apply(
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
        forward = describe(run, uncompiled_model(executor.class_obj.diffusion_model), x, options, kwargs)
        options[FORWARD] = replace(forward, text=0 if c_crossattn is None else c_crossattn.shape[1])
        run.begin()
        run.outer = None if options.get(OVERRIDE) is override else options.get(OVERRIDE)
    hooks = tuple(options.get("wrappers", {}).get(WrappersMP.DIFFUSION_MODEL, {}))
    with apart(options, ("attention", *hooks)):
        return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)


def uncompiled_model(transformer: Any) -> Any:
    """What torch.compile was called with: a torch compile node puts its result in the place of the transformer."""
    return getattr(transformer, "_orig_mod", transformer)


def describe(
    run: NativeRun,
    transformer: Any,
    x: Tensor,
    options: dict[str, Any],
    conditions: dict[str, Any],
) -> NativeForward:
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
        branches=tuple(conditions_of(x, options)),
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
