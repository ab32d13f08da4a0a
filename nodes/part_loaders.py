"""Loaders of what is beside the transformers: text encoder, VAE and CLIP vision encoder, held by ComfyUI's memory
manager. Weights are read when first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io, ui
from torch import nn

from wan_core.checkpoint import load_text_encoder, load_vae
from wan_core.checkpoint.load import load_vision, vision_dtype
from wan_core.config import PRECISIONS, QUANTIZED, VAE_PRECISIONS
from wan_core.config.changes import Stamps, stamps, until_changed
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import optimize_vae
from wan_core.execution.report import WARNING
from wan_core.models.vae.vae import VideoVAE
from wan_core.pipeline.model_parts import Part
from wan_core.pipeline.settings import PartToLoad, compute_dtype, holding
from wan_core.pipeline.sources import recognise

from . import host
from .files import TINY_T2V, embedded, locate, name_of, words_of
from .schema import ADVANCED, output, schema
from .sockets import TextSocket, VAESocket, VisionSocket
from .workers import WorkersSocket, WorkersText, WorkersVAE, device_of, workers_input

PARTS: dict[str, tuple[str, Callable[[Path], Part]]] = {
    "text_encoder": ("text_encoders", lambda path: recognise(path, "text_encoder", load_text_encoder)),
    "vae": ("vae", lambda path: recognise(path, "vae", load_vae)),
    "clip_vision": ("clip_vision", lambda path: recognise(path, "clip_vision", load_vision)),
}
"""By widget: ComfyUI's folder of its files, and what recognises one."""
CHECKS = {
    widget: until_changed(16)(lambda path, find=find: find(path) is not None) for widget, (_, find) in PARTS.items()
}


def file_input(widget: str, tooltip: str) -> Any:
    files = [*embedded(widget), *host.model_names(PARTS[widget][0])]
    return io.Combo.Input(widget, options=files, default=TINY_T2V, tooltip=tooltip)


def precision_input(precisions: Iterable[str], tooltip: str) -> Any:
    """The first of `precisions` is the default."""
    names = list(precisions)
    return io.Combo.Input("precision", **ADVANCED, options=names, default=names[0], tooltip=tooltip)


def part_of(widget: str, name: str) -> Part:
    """The part behind a name of `file_input`. Raises OptionError."""
    return PARTS[widget][1](_path(widget, name))


def _path(widget: str, name: str) -> Path:
    return locate(PARTS[widget][0], name, embedded(widget))


def is_part(widget: str, name: str | None) -> bool:
    """For `validate_inputs`, where None comes through a link. Raises OptionError."""
    return name is None or CHECKS[widget](_path(widget, name))


def file_stamps(widget: str, name: str | None) -> Stamps:
    """For `fingerprint_inputs`."""
    return () if name is None else stamps([_path(widget, name)])


class WanCoreTextEncoderLoader(io.ComfyNode):
    """UMT5 with its tokenizer, on a CLIP socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreTextEncoderLoader",
            "WanCore Text Encoder Loader",
            aliases="wan text encoder, umt5, clip loader, t5",
            shows_text=True,
            description="A UMT5 text encoder. Its output also feeds ComfyUI's own CLIP Text Encode.",
            inputs=[
                file_input(
                    "text_encoder",
                    "UMT5 in models/text_encoders, in the official, Diffusers or ComfyUI layout, or GGUF. "
                    "Files without a tokenizer inside need spiece.model beside them.",
                ),
                precision_input(
                    (name for name in PRECISIONS if name not in QUANTIZED),
                    "What the encoder computes in. 'checkpoint': bf16 on a GPU, fp32 on a CPU, and packed "
                    "weights (GGUF, FP8 with scales) stay packed in memory.",
                ),
                workers_input(),
            ],
            outputs=[output(io.Clip, "clip", "The text encoder.")],
        )

    @classmethod
    def validate_inputs(cls, text_encoder: str | None = None) -> bool:
        return is_part("text_encoder", text_encoder)

    @classmethod
    def fingerprint_inputs(cls, text_encoder: str | None = None, **_: Any) -> Stamps:
        return file_stamps("text_encoder", text_encoder)

    @classmethod
    async def execute(cls, text_encoder: str, precision: str, workers: WorkersSocket | None = None) -> io.NodeOutput:
        """`async`, as of every loader: ComfyUI runs such nodes first, and weights are read while others work."""
        part, device = part_of("text_encoder", text_encoder), device_of(workers)
        dtype = compute_dtype(precision, device)
        quantization = holding(part, None, precision == "checkpoint", device)
        streaming = Residency(host.device(), "stream")
        patcher = host.Held("text encoder", PartToLoad(part, dtype, quantization), residency=streaming)
        if workers is None:
            host.read_ahead([patcher], [()])
        socket = TextSocket(patcher) if workers is None else WorkersText(patcher, precision, workers)
        return io.NodeOutput(socket, ui=ui.PreviewText(words_of(part, name_of(dtype))))


class WanCoreVAELoader(io.ComfyNode):
    """The causal video VAE, 2.1 or 2.2, on a VAE socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreVAELoader",
            "WanCore VAE Loader",
            aliases="wan vae, load vae",
            shows_text=True,
            description="A Wan video VAE. Its output also feeds ComfyUI's own VAE Decode and WanImageToVideo.",
            inputs=[
                file_input("vae", "Wan 2.1 VAE (for A14B) or Wan 2.2 VAE (for TI2V-5B) in models/vae."),
                precision_input(
                    VAE_PRECISIONS,
                    "What the VAE computes in. 'auto': what ComfyUI's options say (--fp32-vae, --bf16-vae), "
                    "otherwise bf16 on a GPU, fp32 on a CPU.",
                ),
                workers_input(),
            ],
            outputs=[output(io.Vae, "vae_out", "The VAE.")],
        )

    @classmethod
    def validate_inputs(cls, vae: str | None = None) -> bool:
        return is_part("vae", vae)

    @classmethod
    def fingerprint_inputs(cls, vae: str | None = None, **_: Any) -> Stamps:
        return file_stamps("vae", vae)

    @classmethod
    async def execute(cls, vae: str, precision: str, workers: WorkersSocket | None = None) -> io.NodeOutput:
        part, here = part_of("vae", vae), host.vae_device()
        precision, notes = _by_options(precision, workers is None)
        dtype = compute_dtype(precision, here if workers is None else workers.device)
        patcher = host.Held("VAE", PartToLoad(part, dtype), partial(_optimized, device=here), load_device=here)
        if workers is None:
            host.read_ahead([patcher], [()])
        socket = VAESocket(patcher) if workers is None else WorkersVAE(patcher, precision, workers)
        return io.NodeOutput(socket, ui=ui.PreviewText("\n".join([words_of(part, name_of(dtype)), *notes])))


def _by_options(precision: str, here: bool) -> tuple[str, list[str]]:
    """The precision of a VAE with ComfyUI's own options for VAEs, which hold where the node says 'auto', and what to
    say about them. here: no workers have it."""
    option, notes = host.vae_precision() if precision == "auto" else None, []
    if option in VAE_PRECISIONS:
        precision = option
        notes.append(f"precision by --{option}-vae")
    elif option is not None:
        notes.append(f"{WARNING}--{option}-vae does not hold: WanCore's VAE computes in bf16 or fp32")
    if host.vae_device() != host.device():
        notes.append("on the CPU by --cpu-vae" if here else f"{WARNING}--cpu-vae does not hold: the workers have it")
    return precision, notes


def _optimized(module: nn.Module, device: torch.device) -> nn.Module:
    assert isinstance(module, VideoVAE)
    vae = optimize_vae(module, device)
    if device.type == "cpu":
        host.make_interruptible(vae)
    return vae


class WanCoreVisionLoader(io.ComfyNode):
    """CLIP ViT-H as Wan uses it, or the embedded model's, on a CLIP_VISION socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreVisionLoader",
            "WanCore CLIP Vision Loader",
            aliases="clip vision loader, clip_vision_h, wan animate, wan i2v",
            shows_text=True,
            description="The CLIP vision encoder of models that look at a picture: Wan-Animate-2, Wan2.2-Animate-14B, "
            "Wan 2.1 image-to-video. Its output feeds ComfyUI's CLIPVisionEncode, with crop none.",
            inputs=[
                file_input(
                    "clip_vision",
                    "clip_vision_h.safetensors in models/clip_vision, or the official "
                    "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth.",
                ),
            ],
            outputs=[output(io.ClipVision, "clip_vision_out", "For CLIPVisionEncode.")],
        )

    @classmethod
    def validate_inputs(cls, clip_vision: str | None = None) -> bool:
        return is_part("clip_vision", clip_vision)

    @classmethod
    def fingerprint_inputs(cls, clip_vision: str | None = None) -> Stamps:
        return file_stamps("clip_vision", clip_vision)

    @classmethod
    async def execute(cls, clip_vision: str) -> io.NodeOutput:
        part = part_of("clip_vision", clip_vision)
        dtype = vision_dtype(compute_dtype("checkpoint", host.device()))
        patcher = host.Held("CLIP vision encoder", PartToLoad(part, dtype))
        host.read_ahead([patcher], [()])
        return io.NodeOutput(VisionSocket(patcher), ui=ui.PreviewText(words_of(part, name_of(dtype))))
