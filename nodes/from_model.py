"""ComfyUI's own MODELs as a model of WanCore: their files or weights, LoRAs and shift."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io, ui
from torch import nn

from wan_core.checkpoint.save import write_safetensors
from wan_core.config import LoadOptions, LoraOptions, OptionError
from wan_core.config.changes import stamps
from wan_core.pipeline.loras import Wanted, read_loras
from wan_core.pipeline.native_patches import lora_checkpoints, loras_of_patches
from wan_core.pipeline.settings import ModelSettings, resolve_settings
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.steps import Expert

from . import host
from .model_loader import check_choices, check_residency, hold, info_of, run_inputs, socket_of
from .native_model import NativeModel, read_native
from .schema import output, schema
from .sockets import MODEL
from .workers import UNCONNECTED, WorkersSocket, device_of, workers_input

IN_MEMORY = "the weights of a MODEL"  # in place of a file's name

# What was made of a native model: kept as long as that model is, so that another strength of a LoRA in front of this
# node loads nothing again. The key of the dictionary is the module that all copies of a MODEL share.
_MADE: weakref.WeakKeyDictionary[nn.Module, tuple[object, ModelSettings, Mapping[Expert, host.Held]]]
_MADE = weakref.WeakKeyDictionary()


class WanCoreFromModel(io.ComfyNode):
    """One or two native MODELs for WanCore's sampler and workers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreFromModel",
            "WanCore from MODEL",
            aliases="wan bridge, model to wancore, convert model",
            shows_text=True,
            description="Takes ComfyUI's own MODELs (Load Diffusion Model, LoRA loaders, ModelSamplingSD3) for the "
            "WanCore Sampler. Files, LoRAs with their strengths and the shift are taken over; what cannot be is named.",
            inputs=[
                io.Model.Input("model", tooltip="The high-noise expert, or a model with one transformer."),
                *run_inputs(),
                io.Model.Input(
                    "low",
                    optional=True,
                    tooltip="The low-noise expert. Nothing connected: the model above runs every step.",
                ),
                workers_input(),
            ],
            outputs=[
                output(MODEL, "model_out", "For the WanCore Sampler and Plan Preview."),
                output(io.String, "info", "What was taken over, and what was not."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        precision: str | None = None,
        attention: str | None = None,
        keep_blocks: int | None = None,
        residency: str | None = None,
        workers: object = UNCONNECTED,
    ) -> bool:
        return check_choices(precision, attention, keep_blocks, residency, workers)

    @classmethod
    def execute(cls, model: Any, low: Any = None, workers: WorkersSocket | None = None, **values: Any) -> io.NodeOutput:
        natives: dict[str, NativeModel] = {"high": read_native(model, "the MODEL" if low is None else "the high MODEL")}
        if low is not None:
            natives["low"] = read_native(low, "the low MODEL")
        in_workers = workers is not None
        unknown = [native.where for native in natives.values() if not isinstance(native.source, Path)]
        if in_workers and unknown:
            raise OptionError(
                f"workers read files, and the file of {' and '.join(unknown)} is not known: use the WanCore Model "
                "Loader, or ComfyUI 0.33 or newer with Load Diffusion Model"
            )
        files = [str(native.source) if isinstance(native.source, Path) else IN_MEMORY for native in natives.values()]
        options = LoadOptions(high=files[0], low=(*files, None)[1], **values)
        check_residency(options.residency, in_workers)
        settings, patchers = _made(natives, options, device_of(workers))
        loras = {expert: _loras(native, settings, expert, in_workers) for expert, native in natives.items()}
        settings.check_loras(loras)
        shift = _shift(natives)
        carried: dict[str, Any] = {"shift": shift, "range_shift": natives["high"].range_shift}
        carried["named_loras"] = not any(loras.values())
        socket = replace(socket_of(options, settings, patchers, workers), loras=loras, **carried)
        lines = [info_of(settings), *settings.lora_lines(loras)]
        lines += [f"shift {shift:g}, as ModelSamplingSD3 set it" if shift else "no ModelSamplingSD3: its own shift"]
        lines += [note for native in natives.values() for note in native.notes]
        info = "\n".join(lines)
        return io.NodeOutput(socket, info, ui=ui.PreviewText(info))


def _made(
    natives: Mapping[str, NativeModel], options: LoadOptions, device: torch.device
) -> tuple[ModelSettings, Mapping[Expert, host.Held]]:
    """The experts of these native models: those of the last time, where nothing but LoRAs and shift changed."""
    sources = [native.source for native in natives.values()]
    files = stamps(source for source in sources if isinstance(source, Path))
    owner, owners = natives["high"].owner, tuple(weakref.ref(native.owner) for native in natives.values())
    key = (tuple(sorted(asdict(options).items())), files, owners, device)
    if owner not in _MADE or _MADE[owner][0] != key:
        settings = resolve_settings(find_experts(*sources), options, device)
        _MADE[owner] = key, settings, hold(settings)
    return _MADE[owner][1:]


def _loras(native: NativeModel, settings: ModelSettings, expert: str, in_files: bool) -> tuple[Wanted, ...]:
    """What the patches of a native model are here. in_files: in files, which workers read."""
    config = settings.recognised.dit
    if not in_files:
        return tuple(loras_of_patches(native.patches, config, native.where))
    options = []
    for strength, checkpoint in lora_checkpoints(native.patches, native.where):
        name = "".join(letter if letter.isalnum() else "_" for letter in checkpoint.where)
        path = host.lasting_folder() / f"{name}.safetensors"
        if not path.is_file():
            tensors = {name: checkpoint.read(name).contiguous() for name in checkpoint.tensors}
            write_safetensors(tensors, path, {})
        options.append(LoraOptions(path=str(path), strength=strength, expert=expert))
    return tuple(read_loras(options, config, "low" in settings.recognised.of)[expert])


def _shift(natives: Mapping[str, NativeModel]) -> float | None:
    """The shift of the first MODEL. Raises OptionError if another has a different one. ComfyUI's page sometimes writes
    8 as 8.000000000000002, which counts as equal."""
    shifts = [native.shift for native in natives.values()]
    if len({shift and round(shift, 9) for shift in shifts}) > 1:
        values = " and ".join(f"{native.where} has {native.shift or 'none'}" for native in natives.values())
        raise OptionError(f"the shift differs ({values}): put ModelSamplingSD3 with one shift behind both models")
    return shifts[0]
