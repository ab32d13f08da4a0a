"""The node with the numbers of step caching and sparse attention, for experts: others choose a word of `speed`."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui  # pyright: ignore[reportMissingImports]

from wan_core.config import MagCacheOptions, SkipOptions, SparseOptions, TaylorSeerOptions
from wan_core.config.table import from_values
from wan_core.sampling.cache.curves import SUFFIX
from wan_core.sampling.cache.skipping import skip_words

from . import host
from .schema import output, schema, widgets
from .sockets import SKIPPING

CACHES = {"none": None, "magcache": MagCacheOptions, "taylorseer": TaylorSeerOptions}


def skipping_input() -> Any:
    return SKIPPING.Input(
        "skipping",
        optional=True,
        tooltip="Numbers in place of a word of speed, from WanCore Step Cache and Sparse Attention.",
    )


class WanCoreSkipping(io.ComfyNode):
    """Which forwards and which keys of attention need not be computed, by numbers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreSkipping",
            "WanCore Step Cache and Sparse Attention",
            aliases="magcache, mag cache, taylorseer, teacache, easycache, step caching, cache, sparse attention, "
            "radial attention, sla, wan fast",
            shows_text=True,
            description="Numbers in place of a word of speed, for experts. A step cache forecasts steps that change "
            "little, in runs of 10 steps or more. Sparse attention reads only the key blocks with the most "
            "attention; it saves most at 720p, and nothing in small videos. The plan preview shows what each step "
            "does.",
            inputs=[
                io.Combo.Input(
                    "cache",
                    options=[*CACHES],
                    default="none",
                    tooltip="magcache: skips a step while a curve that was measured for the model says that it changes "
                    "little, with the WanCore Sampler only. taylorseer: computes every n-th step.",
                ),
                *widgets(MagCacheOptions, "threshold", "max_skips"),
                *widgets(TaylorSeerOptions, "interval"),
                *widgets(MagCacheOptions, "retention"),
                *widgets(SparseOptions),
            ],
            outputs=[output(SKIPPING, "skipping", "For the sampler, the plan preview and WanCore Accelerate.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> list[tuple[str, int]]:
        """The curves beside the models, so that the node runs again when one changes."""
        return host.stamps("diffusion_models", SUFFIX)

    @classmethod
    def execute(cls, cache: str, **numbers: Any) -> io.NodeOutput:
        kind = CACHES[cache]
        caches = {} if kind is None else {cache: from_values(kind, numbers)}
        sparse = from_values(SparseOptions, numbers) if numbers.get("sparsity") else None
        options = SkipOptions(**caches, sparse=sparse)
        return io.NodeOutput(options, ui=ui.PreviewText(skip_words(options)))
