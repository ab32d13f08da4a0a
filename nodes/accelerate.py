"""Node that accelerates ComfyUI's own Wan models."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from wan_core.config import OptionError, SkipOptions, SparseOptions
from wan_core.ops.attention.registry import BACKENDS, resolve_attention
from wan_core.sampling.native.attention import COMFYUI
from wan_core.sampling.sparsity.budgets import keeps_of
from wan_core.sampling.sparsity.run import check_kernel
from wan_core.sampling.sparsity.schedule import PRESETS, sparse_words

from . import host
from .sockets import SKIPPING

OFF = "off"


class WanCoreAccelerate(io.ComfyNode):
    """A MODEL of ComfyUI, with faster attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreAccelerate",
            display_name="WanCore Accelerate",
            category="WanCore",
            description="Makes any Wan model of ComfyUI faster where it is: attention by WanCore's kernels, "
            "and sparse attention. Place it just before the sampler; graphs with two models need one for each. "
            "After a run it shows what it accelerated and what it left to ComfyUI.",
            inputs=[
                io.Model.Input("model", tooltip="A Wan model from any loader, with or without LoRAs."),
                io.Combo.Input(
                    "attention",
                    options=["auto", COMFYUI, *BACKENDS],
                    default="auto",
                    tooltip="The kernel of self-attention. 'auto' takes the fastest that runs here and changes no "
                    "numbers but for rounding; FP8 and int8 kernels ('cudnn-fp8', 'te-fp8', 'int8', 'sage') only by "
                    "name. 'comfyui' leaves dense attention to ComfyUI.",
                ),
                io.Combo.Input(
                    "sparse",
                    options=[OFF, *PRESETS],
                    default=OFF,
                    tooltip="Presets of WanCore Sparse Attention, which reads only the key blocks with the most "
                    "attention. Saves most at 720p.",
                ),
                SKIPPING.Input(
                    "skipping",
                    optional=True,
                    tooltip="Sparse attention with numbers of your own, from WanCore Sparse Attention.",
                ),
            ],
            outputs=[io.Model.Output("model_out", display_name="model", tooltip="For the sampler.")],
        )

    @classmethod
    def execute(cls, model: Any, attention: str, sparse: str, skipping: SkipOptions | None = None) -> io.NodeOutput:
        transformer = host.check_wan(model)
        options = sparse_options(sparse, skipping)
        head_dim = transformer.dim // transformer.num_heads
        place = model.load_device, host.compute_dtype(model), head_dim
        name = attention if attention == COMFYUI else resolve_attention(attention, *place)[0]
        words = [f"attention: {name}"]
        keeps = None
        if options is not None:
            check_kernel(options, "sdpa" if name == COMFYUI else name, place[0], head_dim, 1 << 16)
            keeps = keeps_of(options, host.checkpoint_of(model), transformer.num_layers)
            words.append(f"sparse attention: {sparse_words(options)}" + ", calibrated" * (keeps is not None))
        made = host.accelerate(model, attention, options, keeps, host.reporter())
        return io.NodeOutput(made, ui=ui.PreviewText("\n".join(words)))


def sparse_options(preset: str, skipping: SkipOptions | None) -> SparseOptions | None:
    """What `sparse` and `skipping` ask for together."""
    custom = None if skipping is None else skipping.sparse
    if skipping is not None:
        others = [name for name in ("magcache", "taylorseer", "adaptive", "guidance") if getattr(skipping, name)]
        if others:
            raise OptionError(f"WanCore Accelerate takes sparse attention, and {' and '.join(others)} is connected")
    if custom is not None and preset != OFF:
        raise OptionError(f"sparse is {preset!r} and skipping has sparse attention too: set sparse to {OFF!r}")
    return custom if preset == OFF else PRESETS[preset]
