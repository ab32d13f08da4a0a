"""The experts of a model, held by ComfyUI's memory manager. Weights are read when first used."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comfy_api.latest import io, ui

from wan_core.config import PRECISIONS, QUANTIZED, RESIDENCIES, LoadOptions, OptionError, check_choice
from wan_core.config.changes import Stamps, stamps, until_changed
from wan_core.execution.memory.residency import Residency
from wan_core.execution.report import WARNING
from wan_core.media.preview import TINY as TINY_MAP
from wan_core.media.preview import RGBMap, map_of_channels
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.attention.registry import BACKENDS, CHOSEN, resolve_attention
from wan_core.ops.quant.packed import PRECISION as PACKED
from wan_core.pipeline.load import finish
from wan_core.pipeline.settings import (
    ModelSettings,
    check_quantization,
    compute_dtype,
    find_quantization,
    resolve_settings,
)
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.steps import Expert

from . import host
from .files import TINY_T2V, embedded_expert, locate, name_of, words_of
from .memory import ModelSocket
from .schema import output, schema, widgets
from .sockets import MODEL
from .workers import UNCONNECTED, WorkersModel, WorkersSocket, device_of, workers_input

ALONE = "none"  # no second file
# ComfyUI has all files checked before every prompt, and to recognise two experts takes 60 ms.
_dit_of = until_changed(16)(lambda *paths: find_experts(*paths).dit)


class WanCoreModelLoader(io.ComfyNode):
    """High and low expert; one file alone serves models of a single transformer."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = host.model_names("diffusion_models")
        return schema(
            "WanCoreModelLoader",
            "WanCore Model Loader",
            aliases="wan model, wan 2.2, unet loader, gguf, fp8, quantize, block swap, low vram, out of memory",
            shows_text=True,
            description="Recognises one or two Wan transformers by their contents. Weights are read when first used.",
            inputs=[
                io.Combo.Input(
                    "high",
                    options=[*embedded_expert("high"), *files],
                    default=TINY_T2V,
                    tooltip="The high-noise expert's file in models/diffusion_models, or the only file of a model with "
                    "one transformer. A folder of shards appears as one entry.",
                ),
                io.Combo.Input(
                    "low",
                    options=[ALONE, *embedded_expert("low"), *files],
                    default=TINY_T2V,
                    tooltip="The low-noise expert's file. 'none': the file above runs every step.",
                ),
                *run_inputs(),
                workers_input(),
                *widgets(LoadOptions, "lora_mode"),
            ],
            outputs=[
                output(MODEL, "model", "For the WanCore Sampler and Plan Preview."),
                output(io.String, "info", "What was recognised, as text."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        high: str | None = None,
        low: str | None = None,
        precision: str | None = None,
        attention: str | None = None,
        keep_blocks: int | None = None,
        residency: str | None = None,
        workers: object = UNCONNECTED,
    ) -> bool:
        dit = None if high is None else _dit_of(*_paths(high, low))
        return check_choices(precision, attention, keep_blocks, residency, workers, dit)

    @classmethod
    def fingerprint_inputs(cls, high: str | None = None, low: str | None = None, **_: Any) -> Stamps:
        return stamps(_paths(high, low)) if high is not None else ()

    @classmethod
    async def execute(cls, high: str, low: str, workers: WorkersSocket | None = None, **values: Any) -> io.NodeOutput:
        """`async`, as of every loader: ComfyUI runs such nodes first, and weights are read while others work."""
        paths = [str(path) for path in _paths(high, low)]
        options = LoadOptions(high=paths[0], low=(*paths, None)[1], **values)
        check_residency(options.residency, workers is not None)
        settings = resolve_settings(find_experts(*paths), options, device_of(workers))
        rgb = TINY_MAP if high in embedded_expert("high") else None
        model = socket_of(options, settings, hold(settings), workers, rgb)
        model.read_ahead()
        info = info_of(settings)
        return io.NodeOutput(model, info, ui=ui.PreviewText(info))


def hold(settings: ModelSettings) -> dict[Expert, host.Held]:
    """The experts, held by ComfyUI's memory manager and not loaded yet; both are one where there is one transformer."""
    models = settings.recognised
    finished = partial(finish, settings=settings, device=host.device())
    streaming = Residency(host.device(), "stream")
    names = {"high": "high-noise expert", "low": "low-noise expert"} if "low" in models.of else {"high": "transformer"}
    patchers = {
        expert: host.Held(name, settings.parts[expert], finished, streaming, order)
        for order, (expert, name) in enumerate(names.items(), start=1)  # after the text encoder and the VAE
    }
    return {"high": patchers["high"], "low": patchers.get("low", patchers["high"])}


def socket_of(
    options: LoadOptions,
    settings: ModelSettings,
    patchers: Mapping[Expert, host.Held],
    workers: WorkersSocket | None,
    rgb: RGBMap | None = None,
) -> ModelSocket:
    """rgb: how previews are coloured; None: as the VAE that belongs to the model."""
    colours = rgb or map_of_channels(settings.recognised.vae.z_dim)
    if workers is not None:
        return WorkersModel(options, settings, patchers, colours, workers=workers)
    return ModelSocket(options, settings, patchers, colours, kernels=host.prepare_kernels(settings))


def run_inputs() -> list[Any]:
    """How the transformers are held and run."""
    names = ("precision", "attention", "residency", "compile", "keep_blocks")
    installed = find_spec("transformer_engine") is not None
    precisions = [name for name in PRECISIONS if installed or not name.startswith("te-")]
    return widgets(LoadOptions, *names, attention={"options": [*CHOSEN, *BACKENDS]}, precision={"options": precisions})


def _paths(high: str, low: str | None) -> list[Path]:
    paths = [locate("diffusion_models", high, embedded_expert("high"))]
    return paths if low in (None, ALONE) else [*paths, locate("diffusion_models", low, embedded_expert("low"))]


def check_choices(
    precision: str | None,
    attention: str | None,
    keep_blocks: int | None,
    residency: str | None,
    workers: object,
    dit: DiTConfig | None = None,
) -> bool:
    """For `validate_inputs`, where None comes through a link. Raises OptionError or AttentionError for what this device
    or, if it is known, the model does not allow."""
    device = host.device()
    if precision is not None:
        check_choice("precision", precision, PRECISIONS)
        quantization = find_quantization(precision, device, keep_blocks or 0)
        if dit is not None:
            check_quantization(quantization, dit)
    if attention not in (None, "auto"):
        dtype = compute_dtype(precision or "checkpoint", device)
        head_dim, needs_lse = (None, False) if dit is None else (dit.head_dim, dit.merges_attention)
        resolve_attention(attention, device, dtype, head_dim, needs_lse=needs_lse)
    check_residency(residency, workers is not UNCONNECTED)
    return True


def check_residency(residency: str | None, with_workers: bool) -> None:
    """Raise OptionError for one that is not known, and for one of workers without them."""
    if residency is not None:
        check_choice("residency", residency, RESIDENCIES)
    if residency == "shard" and not with_workers:
        raise OptionError("residency 'shard' is for several GPUs: connect a WanCore Launcher, or choose another")


def _computing(settings: ModelSettings) -> str:
    dtype, keep_blocks = name_of(settings.dtype), settings.options.keep_blocks
    if settings.precision == PACKED:
        said = f"{dtype}, weights as they are stored"
    elif settings.precision in QUANTIZED:
        but = f" but the first and last {keep_blocks}" if keep_blocks else ""
        said = f"{dtype}, blocks{but} in {settings.precision}"
    else:
        return dtype
    return said + (f" ({settings.precision_why})" if settings.precision_why else "")


def info_of(settings: ModelSettings) -> str:
    dit, task, parts = settings.recognised.dit, settings.recognised.task, settings.recognised.of
    kind = "two experts" if task.two_experts else "one transformer for every step"
    said = {expert: words_of(part, _computing(settings)) for expert, part in parts.items()}
    lines = [
        *(WARNING + note for note in settings.recognised.notes),
        f"{task.name}: {kind}, {dit.num_layers} blocks of width {dit.dim}, attention {settings.attention}"
        + (", compiled" if settings.options.compile != "off" else ""),
        *([f"{task.name}: {settings.recognised.why}"] if settings.recognised.why else []),
        *(f"{expert}: {text}" if "low" in parts else text for expert, text in said.items()),
        f"its own settings: {task.steps} steps, shift {task.shift:g}, boundary {task.boundary:g}, guidance "
        f"{task.guidance_high:g} high and {task.guidance_low:g} low, {task.width}x{task.height}, {task.frames} frames",
    ]
    return "\n".join(lines)
