"""What a native MODEL (ComfyUI's `ModelPatcher`) consists of: its file or its weights, LoRA patches and shift. What
cannot be carried to the engine is refused by name if it changes the result, and reported if it changes the speed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wan_core.checkpoint import Checkpoint
from wan_core.checkpoint.comfyui_tensors import SUFFIX as PREFERENCE
from wan_core.checkpoint.opened import TensorInfo
from wan_core.config import OptionError
from wan_core.pipeline.native_patches import PREFIX, Patches

from . import host

HANDLER = "context_handler"  # a model option
LOADER = "load_diffusion_model"  # of ComfyUI 0.33 and newer: reads one file
SAMPLING = "model_sampling"
# What a MODEL may carry that changes only how fast it runs, and the words for it.
SPEED_OBJECTS = {"manual_cast_dtype": "a compute dtype: choose 'precision' here"}
SPEED_OPTIONS = {"torch_compile_kwargs": "torch compile: choose 'compile' here"}
SPEED_TRANSFORMER = {
    "optimized_attention_override": "an attention backend: choose 'attention' here",
    "animate2_cache": "WanAnimate2Cache: the driving video is passed through the model once anyway",
}
POSE_CACHE = "WanAnimate2Cache."  # the names of functions that it registers begin so
SPEED_WRAPPERS = {"torch.compile"}
WINDOW_WRAPPERS = {"ContextWindows_prepare_sampling", "ContextWindows_sampler_sample"}  # that come with `HANDLER`
OURS = "wancore"  # what keys of WanCore's own nodes for a MODEL begin with
DATA = {"lora_metadata"}  # attachments that say something and do nothing
EMPTY_OPTIONS = {"transformer_options"}  # looked into, one by one


@dataclass(frozen=True)
class NativeModel:
    """What is carried. owner: the module that all copies of a MODEL share. source: its file, or the weights in memory.
    shift: that a node set; None for none. range_shift: with which ComfyUI makes sigmas of shares of a run, whether a
    node set it or not. notes: for people."""

    where: str
    owner: nn.Module
    source: Path | Checkpoint
    patches: Patches
    shift: float | None
    range_shift: float
    notes: list[str]


def read_native(model: Any, where: str) -> NativeModel:
    """Raises OptionError naming what cannot be carried. where: what messages call it."""
    if not hasattr(model, "patches") or not hasattr(getattr(model, "model", None), "diffusion_model"):
        raise OptionError(f"{where} is a {type(model).__name__}, not a diffusion model as ComfyUI's loaders give it")
    refused = list(_changes_results(model))
    if refused:
        raise OptionError(
            f"{where} carries what WanCore cannot take over: {'; '.join(refused)}. Remove those nodes, or use "
            "ComfyUI's own sampler for this model"
        )
    path, notes = _file(model)
    notes += [f"not taken over: {change}" for change in _changes_speed(model)]
    return NativeModel(
        where=where,
        owner=model.model,
        source=_weights(model, where) if path is None else path,
        patches={key: list(several) for key, several in model.patches.items()},
        shift=_shift(model, where),
        range_shift=float(getattr(model.get_model_object(SAMPLING), "shift", 1.0)),
        notes=[f"{where}: {note}" for note in notes],
    )


def _file(model: Any) -> tuple[Path | None, list[str]]:
    """The file that the weights come from, and what its loader did to them."""
    path, loader = host.checkpoint_of(model), getattr(model, "cached_patcher_init", None)
    if path is None or getattr(loader[0], "__name__", "") != LOADER or not path.is_file():
        return None, ["the file is not known, the weights are read from memory"]
    dtype = loader[1][1].get("dtype") if len(loader[1]) > 1 else None
    return path, [f"not taken over: weight_dtype {dtype} of the loader, choose 'precision' here"] if dtype else []


def _weights(model: Any, where: str) -> Checkpoint:
    """The transformer's weights, without patches, wherever they are when they are read."""
    module, backup = model.model.diffusion_model, model.backup

    def current(name: str) -> Tensor:
        saved = backup.get(PREFIX + name)
        return getattr(saved, "weight", saved) if saved is not None else _attribute(module, name)

    # PREFERENCE, in ComfyUI 0.37 and newer: which attention a module prefers. Not a weight.
    state = {name: value for name, value in module.state_dict().items() if not name.endswith(PREFERENCE)}
    for name, stored in state.items():
        value = current(name)
        if type(value) not in (Tensor, nn.Parameter) or value.is_meta or value.shape != stored.shape:
            raise OptionError(
                f"the file of {where} is not known, and {name} is a {type(value).__name__} of its own kind in memory: "
                "load the file with the WanCore Model Loader"
            )
    infos = {n: TensorInfo(tuple(t.shape), t.dtype, t.numel() * t.element_size()) for n, t in state.items()}
    # A copy: what the engine writes into its weights must not reach ComfyUI's, nor the other way round.
    kind = getattr(getattr(model.model, "model_config", None), "unet_config", {}).get("model_type")
    metadata = {"config": json.dumps({"transformer": {"model_type": kind}})}  # what tensors do not tell of every model
    return Checkpoint(where, None, infos, metadata, lambda name: current(name).detach().to("cpu", copy=True))


def _attribute(module: nn.Module, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)  # type: ignore[assignment]
    return module


def _shift(model: Any, where: str) -> float | None:
    """The shift that ModelSamplingSD3 has set; None: it is not applied. Raises OptionError for any other sampling."""
    sampling = model.object_patches.get(SAMPLING)
    if sampling is None:
        return None
    kinds = _kinds(sampling)
    scale = getattr(sampling, "noise_scale", None)
    plain = getattr(sampling, "multiplier", None) == 1000 and scale in (None, 1.0)
    if not {"ModelSamplingDiscreteFlow", "CONST"} <= kinds or not plain:
        raise OptionError(
            f"{where} has another sampling than ModelSamplingSD3 sets ({', '.join(sorted(kinds))}): use that node"
        )
    return float(sampling.shift)


def _kinds(sampling: Any) -> set[str]:
    return {kind.__name__ for kind in type(sampling).__mro__}


def _changes_results(model: Any) -> Iterator[str]:
    """In words, everything on a MODEL that changes its results, except weights' patches and the shift."""
    objects = (name for name in model.object_patches if not f"{name}.config".endswith(PREFERENCE))
    yield from (f"object patch {name}" for name in objects if name not in {SAMPLING, *SPEED_OBJECTS})
    if "IMG_TO_IMG_FLOW" in _kinds(model.get_model_object(SAMPLING)):
        yield "the sampling of FlowRVS, which turns a video into another"
    options, carried = model.model_options, {HANDLER, *EMPTY_OPTIONS, *SPEED_OPTIONS}
    if options.get(HANDLER) is not None:
        yield "context windows (they run in ComfyUI's samplers alone, which WanCore Accelerate makes faster)"
    yield from (f"model option {name}" for name, value in options.items() if value and name not in carried)
    for name, value in options.get("transformer_options", {}).items():
        if name in ("patches", "patches_replace"):
            yield from (f"{name} {inner}" for inner, several in value.items() if several)
        elif name in ("wrappers", "callbacks"):
            yield from (f"{name[:-1]} {key}" for key in _keys(value) if not _is_known(key))
        elif name not in SPEED_TRANSFORMER and not _is_known(name) and value:
            yield f"transformer option {name}"
    for name in ("wrappers", "callbacks"):
        yield from (f"{name[:-1]} {key}" for key in _keys(getattr(model, name, {})) if not _is_known(key))
    yield from (f"injection {key}" for key, several in getattr(model, "injections", {}).items() if several)
    yield from (f"weight wrapper of {key}" for key in getattr(model, "weight_wrapper_patches", {}))
    yield from (f"attachment {key}" for key in getattr(model, "attachments", {}).keys() - DATA)
    yield from (f"model {key} beside it" for key in getattr(model, "additional_models", {}).keys() - {"multigpu"})
    if getattr(model, "hook_patches", None):
        yield "LoRAs by hooks (scheduled weights)"


def _changes_speed(model: Any) -> Iterator[str]:
    yield from (change for name, change in SPEED_OBJECTS.items() if model.object_patches.get(name) is not None)
    if any(f"{name}.config".endswith(PREFERENCE) for name in model.object_patches):
        yield "the attention that a LoRA asks for: choose 'attention' here"
    yield from (change for name, change in SPEED_OPTIONS.items() if model.model_options.get(name))
    inner = model.model_options.get("transformer_options", {})
    yield from (change for name, change in SPEED_TRANSFORMER.items() if inner.get(name) is not None)
    if any(key.lower().startswith(OURS) for key in (*inner, *_keys(getattr(model, "wrappers", {})))):
        yield "a WanCore node for MODEL: choose 'attention' here and connect 'skipping' to the WanCore Sampler"
    if getattr(model, "additional_models", {}).get("multigpu"):
        yield "several GPUs: connect a WanCore Launcher"
    if model.load_device != host.device():
        yield f"its device {model.load_device}: without a WanCore Launcher it runs on {host.device()}"


def _is_known(key: str) -> bool:
    return key in SPEED_WRAPPERS | WINDOW_WRAPPERS or key.lower().startswith(OURS)


def _keys(kinds: Mapping[str, Mapping[Any, list[Any]]]) -> list[str]:
    """The keys of wrappers or callbacks; the kind for those without."""
    keys = [
        (kind, key)
        for kind, keyed in kinds.items()
        for key, several in keyed.items()
        if not all(getattr(one, "__qualname__", "").startswith(POSE_CACHE) for one in several)
    ]
    return sorted({kind if key is None else str(key) for kind, key in keys})
