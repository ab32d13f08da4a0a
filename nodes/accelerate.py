"""Nodes that accelerate ComfyUI's own Wan models and their VAE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io, ui

from wan_core.config import SkipOptions
from wan_core.ops.attention.registry import BACKENDS, CHOSEN, resolve_attention
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.cache.speed import attention_at_speed
from wan_core.sampling.native.attention import COMFYUI
from wan_core.sampling.plan import MAX_STEPS
from wan_core.sampling.sparsity.run import check_kernel

from . import host
from .schema import ADVANCED, output, schema, widgets
from .skipping import skipping_input


class WanCoreAccelerate(io.ComfyNode):
    """A MODEL of ComfyUI, with faster attention and step caching."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreAccelerate",
            "WanCore Accelerate (Speed)",
            aliases="faster, speed up wan, wan fast, sage attention, sageattention, flash attention",
            shows_text=True,
            description="Makes any Wan model of ComfyUI faster where it is: attention by WanCore's kernels, "
            "sparse attention, and step caching. Place it just before the sampler; graphs with two models need one for "
            "each. After a run it shows what it accelerated and what it left to ComfyUI.",
            inputs=[
                io.Model.Input("model", tooltip="A Wan model from any loader, with or without LoRAs."),
                *widgets(SkipOptions, "speed", speed={"optional": False}),
                io.Combo.Input(
                    "attention",
                    options=[*CHOSEN, COMFYUI, *BACKENDS],
                    default="auto",
                    tooltip="The kernel of self-attention. 'auto' takes the fastest that runs here and changes no "
                    "numbers but for rounding, and leaves a faster one that was chosen in ComfyUI "
                    "(--use-sage-attention); FP8 and int8 kernels ('cudnn-fp8', 'int8', 'sage') only by name, by "
                    "'fast', which takes the card's first, or where speed is not exact. 'comfyui' leaves dense "
                    "attention to ComfyUI.",
                ),
                io.Combo.Input(
                    "compare",
                    options=["auto", "on", "off"],
                    default="auto",
                    optional=True,
                    tooltip="Shows what was gained: the last step of a sampler runs without WanCore, and the run takes "
                    "longer by what that step saves otherwise. 'auto' does so once for a model and a size, in runs of "
                    "10 steps and more; 'on' in every run.",
                ),
                skipping_input(),
                io.Int.Input(
                    "steps",
                    **ADVANCED,
                    default=0,
                    min=0,
                    max=MAX_STEPS,
                    optional=True,
                    tooltip="Steps of the whole run where several samplers share it, as in KSampler (Advanced). 0 "
                    "estimates it from the sampler's sigmas: exact for the schedulers simple, normal, sgm_uniform and "
                    "ddim_uniform.",
                ),
            ],
            outputs=[output(io.Model, "model_out", "For the sampler.")],
        )

    @classmethod
    def validate_inputs(cls, attention: str | None = None) -> bool:
        """Whether this device has the kernel; whether it takes the model is known when the node runs."""
        if attention not in (None, COMFYUI, *CHOSEN):
            resolve_attention(attention, host.device(), torch.bfloat16, None)
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        speed: str,
        attention: str,
        compare: str = "auto",
        skipping: SkipOptions | None = None,
        steps: int = 0,
    ) -> io.NodeOutput:
        transformer = host.check_wan(model)
        options = replace(skipping or SkipOptions(), speed=speed)
        attention = attention_at_speed(attention, speed)
        why = host.why_comfyui(model) if attention == "auto" else None
        attention = attention if why is None else COMFYUI
        head_dim = transformer.dim // transformer.num_heads
        place = model.load_device, host.compute_dtype(model), head_dim
        name = attention if attention == COMFYUI else resolve_attention(attention, *place)[0]
        lines = [f"attention: {name}" if why is None else f"attention: {name} ({why})"]
        if options.sparse is not None:
            check_kernel(options.sparse, "sdpa" if name == COMFYUI else name, place[0], head_dim, 1 << 16)
        accelerated = host.accelerate(model, attention, options, host.reporter(), steps, compare)
        if options != SkipOptions():
            lines.append(f"left out: {skip_words(options)}")
        lines += host.words_before(accelerated)
        return io.NodeOutput(accelerated, ui=ui.PreviewText("\n".join(lines)))


class WanCoreAccelerateVAE(io.ComfyNode):
    """A VAE of ComfyUI that encodes equal frames once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreAccelerateVAE",
            "WanCore Accelerate VAE",
            aliases="faster vae encode, wan image to video, wan vae",
            description="ComfyUI's nodes give a video model one picture and many grey frames, and encode all of them. "
            "Behind this node the VAE of Wan 2.1 and 2.2 encodes frames that are equal once. Place it behind Load VAE. "
            "Other VAEs, and videos in which no frame stands still, are left to ComfyUI.",
            inputs=[io.Vae.Input("vae", tooltip="From ComfyUI's Load VAE.")],
            outputs=[output(io.Vae, "vae_out", "For Wan Image to Video and all others that encode or decode.")],
        )

    @classmethod
    def execute(cls, vae: Any) -> io.NodeOutput:
        return io.NodeOutput(host.with_still_frames(vae))
