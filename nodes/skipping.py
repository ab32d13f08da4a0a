"""Nodes whose settings say which forwards of a run need not be whole: step caching and sparse attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from comfy_api.latest import io, ui  # pyright: ignore[reportMissingImports]

from wan_core.config import (
    MagCacheOptions,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
)
from wan_core.sampling.cache.magcache import CURVE_FILES
from wan_core.sampling.cache.magcache import PRESETS as CACHES
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.sparsity.schedule import PRESETS

from . import host
from .schema import output, schema, widgets
from .sockets import SKIPPING

CUSTOM = "custom"  # preset that uses the numbers below it


def skipping_schema(
    node_id: str, display_name: str, inputs: list[Any], later: Sequence[Any] = (), **more: Any
) -> io.Schema:
    """The schema of a node that makes settings, alone or combined with those of another. later: inputs that were added
    when graphs had the node already."""
    other = SKIPPING.Input(
        "skipping",
        optional=True,
        tooltip="Settings of another node of this kind, to combine with this one's. Only one step cache can be "
        "used; sparse attention combines with any.",
    )
    return schema(
        node_id, display_name, shows_text=True, inputs=[*inputs, other, *later], outputs=[skipping_output()], **more
    )


def skipping_output() -> Any:
    return output(SKIPPING, "skipping_out", "For the sampler and the plan preview.")


def joined(skipping: SkipOptions | None, **settings: Any) -> io.NodeOutput:
    combined = replace(skipping or SkipOptions(), **settings)
    return io.NodeOutput(combined, ui=ui.PreviewText(skip_words(combined)))


def measured_files() -> list[tuple[str, int]]:
    """What was measured of models and lies beside them, which settings take: for `fingerprint_inputs`, so that a node
    runs again when a file changes."""
    return host.stamps("diffusion_models", CURVE_FILES.suffix)


class WanCoreMagCache(io.ComfyNode):
    """Reuse the blocks' last residual while a measured curve says that its magnitude changes little."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return skipping_schema(
            "WanCoreMagCache",
            "WanCore MagCache",
            aliases="magcache, mag cache, teacache, easycache, wan fast, step caching, cache",
            description="Step caching by a curve measured for the model. Skipped steps are decided before the run; the "
            "plan preview shows them.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*CACHES, CUSTOM],
                    default="balanced",
                    tooltip="quality, balanced or fast; custom uses the numbers below instead. The rule applies to all "
                    "of them.",
                ),
                *widgets(MagCacheOptions),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> list[tuple[str, int]]:
        return measured_files()

    @classmethod
    def execute(cls, preset: str, rule: str, skipping: SkipOptions | None = None, **numbers: Any) -> io.NodeOutput:
        custom = MagCacheOptions(**numbers)
        options = custom if preset == CUSTOM else CACHES[preset]
        return joined(skipping, magcache=replace(options, rule=rule))


class WanCoreTaylorSeer(io.ComfyNode):
    """Compute every n-th step, forecast the residual in between."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return skipping_schema(
            "WanCoreTaylorSeer",
            "WanCore TaylorSeer",
            aliases="taylorseer, teacache, easycache, step caching, cache",
            description="Step caching: computes every n-th step and forecasts the blocks' residual in between. Needs "
            "no curve.",
            inputs=widgets(TaylorSeerOptions),
        )

    @classmethod
    def execute(cls, skipping: SkipOptions | None = None, **numbers: Any) -> io.NodeOutput:
        return joined(skipping, taylorseer=TaylorSeerOptions(**numbers))


class WanCoreSparseAttention(io.ComfyNode):
    """Self-attention that reads only selected key blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return skipping_schema(
            "WanCoreSparseAttention",
            "WanCore Sparse Attention",
            aliases="sparse attention, radial attention, sage, wan fast, sla",
            description="Block-sparse self-attention: every layer reads the key blocks whose replacement would change "
            "its output most, and replaces the others by their means and slopes. Saves most at 720p, where attention "
            "takes most of the time; small videos gain nothing. The plan preview shows the share of keys per step.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default="balanced",
                    tooltip="quality, balanced or fast; custom uses the numbers below, which have no effect otherwise.",
                ),
                *widgets(SparseOptions),
            ],
        )

    @classmethod
    def execute(cls, preset: str, kernel: str, skipping: SkipOptions | None = None, **numbers: Any) -> io.NodeOutput:
        options = SparseOptions(**numbers) if preset == CUSTOM else PRESETS[preset]
        return joined(skipping, sparse=replace(options, kernel=kernel))
