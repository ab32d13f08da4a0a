"""Node that accelerates ComfyUI's own Wan models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from wan_core.config import OptionError, SkipOptions, SparseOptions
from wan_core.ops.attention.registry import BACKENDS, CHOSEN, resolve_attention
from wan_core.sampling.cache.magcache import PRESETS as CACHES
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.native.attention import COMFYUI
from wan_core.sampling.native.plan import WholeRun
from wan_core.sampling.plan import MAX_STEPS
from wan_core.sampling.sparsity.run import check_kernel
from wan_core.sampling.sparsity.schedule import PRESETS, sparse_words

from . import host
from .schema import ADVANCED, output, schema
from .skipping import measured_files
from .sockets import SKIPPING

OFF = "off"


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
            "each. "
            "After a run it shows what it accelerated and what it left to ComfyUI.",
            inputs=[
                io.Model.Input("model", tooltip="A Wan model from any loader, with or without LoRAs."),
                io.Combo.Input(
                    "attention",
                    options=[*CHOSEN, COMFYUI, *BACKENDS],
                    default="auto",
                    tooltip="The kernel of self-attention. 'auto' takes the fastest that runs here and changes no "
                    "numbers but for rounding; FP8 and int8 kernels ('cudnn-fp8', 'int8', 'sage') only by "
                    "name, or by 'fast', which takes the card's first. 'comfyui' leaves dense attention to ComfyUI.",
                ),
                io.Combo.Input(
                    "sparse",
                    **ADVANCED,
                    options=[OFF, *PRESETS],
                    default=OFF,
                    tooltip="Presets of WanCore Sparse Attention, which reads only the key blocks with the most "
                    "attention. Saves most at 720p.",
                ),
                SKIPPING.Input(
                    "skipping",
                    optional=True,
                    tooltip="Sparse attention or a step cache with numbers of your own, from WanCore Sparse Attention, "
                    "MagCache and TaylorSeer.",
                ),
                io.Combo.Input(
                    "cache",
                    **ADVANCED,
                    options=[OFF, *CACHES],
                    default=OFF,
                    optional=True,
                    tooltip="Presets of WanCore MagCache, which skips steps that change little. On models without a "
                    "curve (all but Wan 2.2 text and image to video and 5B), TaylorSeer skips nearly the same steps, "
                    "and the report says so. Needs 10 steps or more.",
                ),
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
                io.Sigmas.Input(
                    "sigmas",
                    optional=True,
                    tooltip="The sigmas of the whole run, before they were split, for samplers that take SIGMAS.",
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
            ],
            outputs=[output(io.Model, "model_out", "For the sampler.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> list[tuple[str, int]]:
        return measured_files()

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
        attention: str,
        sparse: str,
        skipping: SkipOptions | None = None,
        cache: str = OFF,
        steps: int = 0,
        sigmas: Tensor | None = None,
        compare: str = "auto",
    ) -> io.NodeOutput:
        transformer = host.check_wan(model)
        options, caching = sparse_options(sparse, skipping), cache_options(cache, skipping)
        whole = WholeRun(steps, () if sigmas is None else tuple(sigmas.tolist()))
        head_dim = transformer.dim // transformer.num_heads
        place = model.load_device, host.compute_dtype(model), head_dim
        name = attention if attention == COMFYUI else resolve_attention(attention, *place)[0]
        lines = [f"attention: {name}"]
        if options is not None:
            check_kernel(options, "sdpa" if name == COMFYUI else name, place[0], head_dim, 1 << 16)
            lines.append(f"sparse attention: {sparse_words(options)}")
        report = host.reporter()
        accelerated = host.accelerate(model, attention, options, report, whole, compare)
        host.attach(accelerated, None if caching is None else host.StepCache(caching, whole, report))
        if caching is not None:
            lines.append(f"step cache: {host.cache_words(accelerated, caching)}")
        lines += host.words_before(accelerated)
        return io.NodeOutput(accelerated, ui=ui.PreviewText("\n".join(lines)))


def sparse_options(preset: str, skipping: SkipOptions | None) -> SparseOptions | None:
    """What `sparse` and `skipping` ask for together."""
    custom = None if skipping is None else skipping.sparse
    if custom is not None and preset != OFF:
        raise OptionError(f"sparse is {preset!r} and skipping has sparse attention too: set sparse to {OFF!r}")
    return custom if preset == OFF else PRESETS[preset]


def cache_options(preset: str, skipping: SkipOptions | None) -> SkipOptions | None:
    """The step cache that `cache` and `skipping` ask for together."""
    custom = None if skipping is None else replace(skipping, sparse=None)
    custom = None if custom == SkipOptions() else custom
    if custom is not None and preset != OFF:
        raise OptionError(f"cache is {preset!r} and skipping has {skip_words(custom)} too: set cache to {OFF!r}")
    return custom if preset == OFF else SkipOptions(magcache=CACHES[preset])
