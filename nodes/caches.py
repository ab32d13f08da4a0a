"""Nodes for step caching: MagCache, TaylorSeer and the adaptive cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from wan_core.config import AdaptiveOptions, MagCacheOptions, SkipOptions, TaylorSeerOptions
from wan_core.sampling.cache.magcache import PRESETS

from .schema import schema, widgets
from .skipping import CUSTOM, joined, measured_files, skipping_input, skipping_output


class WanCoreMagCache(io.ComfyNode):
    """Reuse the blocks' last residual while a measured curve says that its magnitude changes little."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreMagCache",
            "WanCore MagCache",
            aliases=("magcache", "mag cache", "teacache", "easycache", "wan fast", "step caching", "cache"),
            shows_text=True,
            description="Step caching by a curve measured for the model. Skipped steps are decided before the run; the "
            "plan preview shows them.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default="balanced",
                    tooltip="quality, balanced or fast; custom uses the numbers below instead. The rule applies to all "
                    "of them.",
                ),
                *widgets(MagCacheOptions),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> list[tuple[str, int]]:
        return measured_files()

    @classmethod
    def execute(cls, preset: str, rule: str, skipping: SkipOptions | None = None, **numbers: Any) -> io.NodeOutput:
        custom = MagCacheOptions(**numbers)
        options = custom if preset == CUSTOM else PRESETS[preset]
        return joined(skipping, magcache=replace(options, rule=rule))


class WanCoreTaylorSeer(io.ComfyNode):
    """Compute every n-th step, forecast the residual in between."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreTaylorSeer",
            "WanCore TaylorSeer",
            aliases=("taylorseer", "teacache", "easycache", "step caching", "cache"),
            shows_text=True,
            description="Step caching: computes every n-th step and forecasts the blocks' residual in between. Needs "
            "no curve.",
            inputs=[
                *widgets(TaylorSeerOptions),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def execute(cls, skipping: SkipOptions | None = None, **numbers: Any) -> io.NodeOutput:
        return joined(skipping, taylorseer=TaylorSeerOptions(**numbers))


class WanCoreAdaptiveCache(io.ComfyNode):
    """Decide during the run which steps to skip."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreAdaptiveCache",
            "WanCore Adaptive Cache",
            aliases=("teacache", "easycache", "first block cache", "step caching", "wan fast", "cache"),
            shows_text=True,
            description="Step caching by the rate of change of the velocity, measured during the run. The plan can "
            "only show which steps may be skipped.",
            inputs=[
                *widgets(AdaptiveOptions),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def execute(cls, skipping: SkipOptions | None = None, **numbers: Any) -> io.NodeOutput:
        return joined(skipping, adaptive=AdaptiveOptions(**numbers))
