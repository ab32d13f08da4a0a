"""What a resolution schedule meets on one of ComfyUI's own Wan models, and whether it follows steps of a smaller size.

Checked when a sampler begins, with its conditions encoded and every wrapper in place: before its first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from wan_core.config import OptionError, StageOptions

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
        named = ", ".join(base.__name__ for base in kind.__bases__) + f" with noise scale {scale:g}" * (scale != 1)
        raise OptionError(
            f"a resolution schedule needs the flow sampling that Wan is trained with, and this model has {named}: "
            "remove the node that sets it, or disconnect WanCore Resolution Schedule"
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


def check_inputs(given: Mapping[str, Any]) -> None:
    """Raise OptionError for what a forward gets that has a size and would keep it."""
    unknown = [name for name, value in given.items() if value is not None and name not in FOLLOWING]
    if unknown:
        raise OptionError(f"a resolution schedule does not change the size of {', '.join(unknown)}: {REMEDY}")


def name_of(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def words_of(hook: Callable[..., Any]) -> str:
    """What a user knows a function of another node by."""
    name = name_of(hook)
    return next((words for begins, words in NODES.items() if name.startswith(begins)), f"{name} of {hook.__module__}")
