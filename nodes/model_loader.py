"""The experts of a model, held by ComfyUI's memory manager. Weights are read when first used."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from comfy_api.latest import io, ui
from torch import nn

from wan_core.checkpoint.detect import empty_module
from wan_core.config import COMPILES, PRECISIONS, QUANTIZED, RESIDENCIES, OptionError, check_choice
from wan_core.execution.optimize import check_compile, optimize
from wan_core.media.preview import TINY as TINY_MAP
from wan_core.media.preview import map_of_channels
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.linears import quantized_names
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.registry import BACKENDS, resolve_attention
from wan_core.ops.quant.packed import PRECISION as PACKED
from wan_core.ops.quant.swap import Quantization, swap_linears
from wan_core.pipeline.builder import compute_dtype, find_quantization, precision_of
from wan_core.pipeline.sources import Experts, find_experts

from . import host
from .files import TINY_T2V, embedded_expert, fingerprint, locate, name_of, refusal, words_of
from .sockets import MODEL, ModelSocket
from .workers import WorkersSocket, workers_input

ALONE = "none"  # no second file
MAX_KEPT = 20  # half the blocks of the largest model


class WanCoreModelLoader(io.ComfyNode):
    """High and low expert; one file alone serves models of a single transformer."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = host.model_names("diffusion_models")
        return io.Schema(
            node_id="WanCoreModelLoader",
            display_name="WanCore Model Loader",
            category="WanCore",
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
                io.Combo.Input(
                    "precision",
                    options=list(PRECISIONS),
                    default="checkpoint",
                    tooltip="What the transformer computes in. 'checkpoint': bf16 on a GPU, fp32 on a CPU, and weights "
                    "that the file packs (GGUF, NVFP4, MXFP8) stay packed in memory; fp16 is "
                    "never used, because Wan's activations overflow in it. 'fp8' multiplies the blocks' matrices in "
                    "FP8, faster and in half the memory, with a scale for every row ('-tensor', '-block': for those); "
                    "it needs a GPU with FP8 units (Ada or newer, for '-block' Hopper). 'te-...' does so with the "
                    "kernels of Transformer Engine, which must be installed. 'fp8-weights' only stores FP8: half the "
                    "memory on any GPU, no faster.",
                ),
                io.Combo.Input(
                    "attention",
                    options=["auto", *BACKENDS],
                    default="auto",
                    tooltip="The attention kernel. 'auto' takes the fastest that runs here and changes no numbers; FP8 "
                    "and int8 kernels ('cudnn-fp8', 'te-fp8', 'sage') only by name. One that cannot run is refused, "
                    "never replaced silently.",
                ),
                io.Combo.Input(
                    "residency",
                    options=list(RESIDENCIES),
                    default="auto",
                    tooltip="'auto': ComfyUI's memory manager decides what leaves the device; an expert that does not "
                    "fit has its blocks streamed from host memory. 'resident': both experts stay on the device "
                    "together. 'swap': everything else leaves before an expert is loaded. 'stream': blocks always "
                    "stream. 'shard', with workers: every GPU holds a part of each expert.",
                ),
                io.Combo.Input(
                    "compile",
                    options=list(COMPILES),
                    default=COMPILES[0],
                    optional=True,
                    tooltip="'blocks' compiles one transformer block, once for both experts: faster steps for some "
                    "seconds at the first use. Another size, length, prompt or seed compiles nothing again. Needs "
                    "Triton on a GPU, a C++ compiler on a CPU.",
                ),
                io.Int.Input(
                    "keep_blocks",
                    default=0,
                    min=0,
                    max=MAX_KEPT,
                    optional=True,
                    tooltip="How many of the first and of the last blocks an FP8 'precision' leaves as they are, for "
                    "more exact results. 0: every block is quantised.",
                ),
                workers_input(),
            ],
            outputs=[
                MODEL.Output("model", display_name="model", tooltip="For the WanCore Sampler and Plan Preview."),
                io.String.Output("info", display_name="info", tooltip="What was recognised, as text."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, high: str = "", low: str = "", precision: str = "", attention: str = "auto", keep_blocks: int = 0
    ) -> bool | str:
        """ComfyUI leaves what is named here to us. Empty is what another node will say."""

        def check() -> None:
            dit = find_experts(*_paths(high, low)).dit if high else None
            if precision:
                _quantization(precision, keep_blocks, dit)
            if attention != "auto":
                _attention(attention, precision, dit)

        return refusal(check)

    @classmethod
    def fingerprint_inputs(
        cls,
        high: str = "",
        low: str = "",
        precision: str = "",
        attention: str = "",
        residency: str = "",
        compile: str = "",
        keep_blocks: int = 0,
        workers: None = None,
    ) -> list[tuple[str, int]]:
        return fingerprint(*_paths(high, low)) if high else []

    @classmethod
    def execute(
        cls,
        high: str,
        low: str,
        precision: str,
        attention: str,
        residency: str,
        compile: str = COMPILES[0],
        keep_blocks: int = 0,
        workers: WorkersSocket | None = None,
    ) -> io.NodeOutput:
        check_choice("compile", compile, COMPILES)
        device = host.device() if workers is None else workers.device
        check_compile(compile, device)
        if residency == "shard" and workers is None:
            raise OptionError("residency 'shard' is for several GPUs: connect a WanCore Launcher, or choose another")
        paths = [str(path) for path in _paths(high, low)]
        found = find_experts(*paths)
        spec = {"high": paths[0], "low": (*paths, None)[1], "precision": precision, "keep_blocks": keep_blocks}
        spec |= {"attention": attention, "compile": compile, "residency": residency}
        stored = precision == "checkpoint"
        precision = precision_of(precision, found.high, device, found.low)
        quantization = _quantization(precision, keep_blocks, found.dit, stored, device)
        dtype = compute_dtype(precision, device)
        chosen, attend = _attention(attention, precision, found.dit, device)
        held = partial(
            host.Held,
            dtype=dtype,
            finish=partial(_optimized, attend=attend, compile=compile),
            quantization=quantization,
        )
        first = held("high-noise expert" if found.low else "transformer", found.high)
        second = held("low-noise expert", found.low) if found.low else first
        rgb = TINY_MAP if high in embedded_expert("high") else map_of_channels(found.vae.z_dim)
        named = name_of(dtype) if quantization is None else precision
        both = {"high": first, "low": second}
        model = ModelSocket(found, both, named, chosen, compile, residency, rgb, workers=workers, spec=spec)
        info = _info(found, _computing(dtype, precision, keep_blocks), chosen, compile)
        return io.NodeOutput(model, info, ui=ui.PreviewText(info))


def _paths(high: str, low: str) -> list[Path]:
    paths = [locate("diffusion_models", high, embedded_expert("high"))]
    return paths if low in ("", ALONE) else [*paths, locate("diffusion_models", low, embedded_expert("low"))]


def _quantization(
    precision: str,
    keep_blocks: int,
    dit: DiTConfig | None,
    as_stored: bool = False,
    device: torch.device | None = None,
) -> Quantization | None:
    """How the linears are held; None where they are not quantised. Raises OptionError for what this device or, if it is
    known, the model does not allow."""
    if not as_stored:  # then it is what the checkpoint asks for
        check_choice("precision", precision, PRECISIONS)
    quantization = find_quantization(precision, device or host.device(), keep_blocks, as_stored=as_stored)
    if quantization is not None and dit is not None:
        quantized_names(dit, quantization.keep_blocks)  # refuses to keep more blocks than there are
        block = replace(dit, num_layers=1)  # all have the same shapes
        swap_linears(empty_module(block), quantization.kind, quantized_names(block), torch.bfloat16)  # refuses shapes
    return quantization


def _attention(
    name: str, precision: str, dit: DiTConfig | None, device: torch.device | None = None
) -> tuple[str, Attention]:
    """As `resolve_attention`, for this device unless another is given."""
    device = device or host.device()
    return resolve_attention(name, device, compute_dtype(precision, device), None if dit is None else dit.head_dim)


def _optimized(module: nn.Module, attend: Attention, compile: str) -> nn.Module:
    assert isinstance(module, WanModel)
    return optimize(module, attend=attend, compile=compile, device=host.device())


def _computing(dtype: torch.dtype, precision: str, keep_blocks: int) -> str:
    if precision == PACKED:
        return f"{name_of(dtype)}, weights as they are stored"
    if precision not in QUANTIZED:
        return name_of(dtype)
    kept = f" but the first and last {keep_blocks}" if keep_blocks else ""
    return f"{name_of(dtype)}, blocks{kept} in {precision}"


def _info(found: Experts, computing: str, attention: str, compile: str) -> str:
    dit, task = found.dit, found.task
    kind = "two experts" if task.two_experts else "one transformer for every step"
    lines = [
        f"{task.name}: {kind}, {dit.num_layers} blocks of width {dit.dim}, attention {attention}"
        + (", compiled" if compile != "off" else ""),
        f"high: {words_of(found.high, computing)}" if found.low else words_of(found.high, computing),
        *([f"low: {words_of(found.low, computing)}"] if found.low else []),
        f"its own settings: {task.steps} steps, shift {task.shift:g}, boundary {task.boundary:g}, guidance "
        f"{task.guidance_high:g} high and {task.guidance_low:g} low, {task.width}x{task.height}, {task.frames} frames",
    ]
    return "\n".join(lines)
