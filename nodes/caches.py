"""Nodes for step caching: MagCache, TaylorSeer and the adaptive cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from wan_core.config import MAGCACHE_RULES, AdaptiveOptions, MagCacheOptions, SkipOptions, TaylorSeerOptions
from wan_core.sampling.cache.magcache import PRESETS

from .schema import ADVANCED, newer
from .skipping import CUSTOM, joined, measured_files, skipping_input, skipping_output


def retention_input() -> Any:
    return io.Float.Input(
        "retention",
        **ADVANCED,
        default=0.2,
        min=0.0,
        max=1.0,
        step=0.05,
        round=0.001,
        tooltip="Share of each expert's steps, from its first one, that are always computed.",
    )


class WanCoreMagCache(io.ComfyNode):
    """Reuse the blocks' last residual while a measured curve says that its magnitude changes little."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreMagCache",
            display_name="WanCore MagCache",
            category="WanCore",
            **newer("WanCoreMagCache"),
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
                io.Float.Input(
                    "threshold",
                    **ADVANCED,
                    default=0.12,
                    min=0.0,
                    max=10.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="For custom: accumulated error of the residual's magnitude at which a step is computed "
                    "again. quality has 0.06, balanced and fast 0.24.",
                ),
                io.Int.Input(
                    "max_skips",
                    **ADVANCED,
                    default=2,
                    min=0,
                    max=50,
                    tooltip="For custom: maximum number of steps skipped in a row. quality and balanced have 1, fast "
                    "2.",
                ),
                retention_input(),
                io.Combo.Input(
                    "rule",
                    **ADVANCED,
                    options=list(MAGCACHE_RULES),
                    default="joint",
                    tooltip="joint: one decision for both guidance branches. published: one decision for each branch, "
                    "as in the paper, for comparison.",
                ),
                io.Int.Input(
                    "order",
                    **ADVANCED,
                    default=1,
                    min=0,
                    max=2,
                    tooltip="For custom: what a skipped step uses. 0: the last residual, as published. 1 or 2: a "
                    "forecast from the last residuals, closer to the full run, with more memory. The presets have 2.",
                ),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def fingerprint_inputs(
        cls,
        preset: str = "",
        threshold: float = 0,
        max_skips: int = 0,
        retention: float = 0,
        rule: str = "",
        order: int = 0,
        skipping: None = None,
    ) -> list[tuple[str, int]]:
        return measured_files()

    @classmethod
    def execute(
        cls,
        preset: str,
        threshold: float,
        max_skips: int,
        retention: float,
        rule: str,
        order: int,
        skipping: SkipOptions | None = None,
    ) -> io.NodeOutput:
        custom = MagCacheOptions(threshold=threshold, max_skips=max_skips, retention=retention, order=order)
        options = custom if preset == CUSTOM else PRESETS[preset]
        return joined(skipping, magcache=replace(options, rule=rule))


class WanCoreTaylorSeer(io.ComfyNode):
    """Compute every n-th step, forecast the residual in between."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreTaylorSeer",
            display_name="WanCore TaylorSeer",
            category="WanCore",
            **newer("WanCoreTaylorSeer"),
            description="Step caching: computes every n-th step and forecasts the blocks' residual in between. Needs "
            "no curve.",
            inputs=[
                io.Int.Input(
                    "interval", default=2, min=1, max=50, tooltip="Compute every n-th step; 1 computes all steps."
                ),
                io.Int.Input(
                    "order",
                    default=1,
                    min=0,
                    max=2,
                    tooltip="0 reuses the last residual, 1 and 2 extrapolate.",
                ),
                retention_input(),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def execute(cls, interval: int, order: int, retention: float, skipping: SkipOptions | None = None) -> io.NodeOutput:
        return joined(skipping, taylorseer=TaylorSeerOptions(interval=interval, order=order, retention=retention))


class WanCoreAdaptiveCache(io.ComfyNode):
    """Decide during the run which steps to skip."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreAdaptiveCache",
            display_name="WanCore Adaptive Cache",
            category="WanCore",
            **newer("WanCoreAdaptiveCache"),
            description="Step caching by the rate of change of the velocity, measured during the run. The plan can "
            "only show which steps may be skipped.",
            inputs=[
                io.Float.Input(
                    "threshold",
                    **ADVANCED,
                    default=0.1,
                    min=0.0,
                    max=10.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="Accumulated relative change of the velocity, as estimated, up to which steps are skipped.",
                ),
                io.Int.Input(
                    "max_skips",
                    default=3,
                    min=0,
                    max=50,
                    tooltip="Maximum number of steps skipped in a row.",
                ),
                retention_input(),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def execute(
        cls, threshold: float, max_skips: int, retention: float, skipping: SkipOptions | None = None
    ) -> io.NodeOutput:
        options = AdaptiveOptions(threshold=threshold, max_skips=max_skips, retention=retention)
        return joined(skipping, adaptive=options)
