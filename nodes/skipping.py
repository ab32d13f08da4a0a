"""Which forwards of a run need not run: settings for the sampler's `skipping` input, and the calibration they go by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from comfy_api.latest import io, ui

from wan_core.cache.curves import SUFFIX, Curve, curve_path, is_embedded, write_curve
from wan_core.cache.magcache import PRESETS
from wan_core.cache.skipping import skip_words
from wan_core.conditioning import draw_noise
from wan_core.config import (
    MAGCACHE_RULES,
    SPARSE_KERNELS,
    AdaptiveOptions,
    GuidanceOptions,
    MagCacheOptions,
    OptionError,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
    check_folder,
)
from wan_core.plan import Plan
from wan_core.quality.calibrate import measure
from wan_core.quality.pictures import draw_curve, preset_plans
from wan_core.report import Report
from wan_core.sparsity.schedule import PRESETS as SPARSE_PRESETS

from . import host
from .conditioning import join
from .pictures import as_image, shown
from .sampling import plan_inputs, plan_of
from .sockets import CONDITIONING, MODEL, SKIPPING, ModelSocket

CUSTOM = "custom"
BESIDE, SHOW = "save beside the model", "only show"


def skipping_input() -> Any:
    return SKIPPING.Input(
        "skipping",
        optional=True,
        tooltip="Settings of another of these nodes, to be joined with this one's. Only one may decide about whole "
        "steps; the guidance schedule goes with any.",
    )


def retention_input() -> Any:
    return io.Float.Input(
        "retention",
        default=0.2,
        min=0.0,
        max=1.0,
        step=0.05,
        round=0.001,
        tooltip="Share of each expert's steps, from its first on, that always computes.",
    )


def skipping_output() -> Any:
    return SKIPPING.Output("skipping_out", display_name="skipping", tooltip="For the sampler and the plan preview.")


def joined(skipping: SkipOptions | None, **settings: Any) -> io.NodeOutput:
    found = replace(skipping or SkipOptions(), **settings)
    return io.NodeOutput(found, ui=ui.PreviewText(skip_words(found)))


class WanCoreMagCache(io.ComfyNode):
    """Reuse the blocks' last residual where its magnitude is known to change little."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreMagCache",
            display_name="WanCore MagCache",
            category="WanCore",
            description="Skips steps by a curve measured for the model, decided before the run. The plan preview shows "
            "every skipped step.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default="balanced",
                    tooltip="quality, balanced or fast; custom takes the numbers below (but for the rule), which count "
                    "only then.",
                ),
                io.Float.Input(
                    "threshold",
                    default=0.12,
                    min=0.0,
                    max=10.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="For custom: the error of magnitude that may add up before a step computes again. 0.04 is "
                    "careful, 0.24 fast.",
                ),
                io.Int.Input("max_skips", default=2, min=0, max=50, tooltip="For custom: most steps skipped in a row."),
                retention_input(),
                io.Combo.Input(
                    "rule",
                    options=list(MAGCACHE_RULES),
                    default="joint",
                    tooltip="joint: both branches of guidance skip together. published: each decides for itself, as in "
                    "the publication, for comparison.",
                ),
                io.Int.Input(
                    "order",
                    default=1,
                    min=0,
                    max=2,
                    tooltip="For custom: what a skipped step uses. 0 is the last residual, as published; 1 or 2 a "
                    "forecast from the last ones, which is nearer to the full run and holds more memory.",
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
        return host.stamps("diffusion_models", SUFFIX)  # what goes by a curve runs again when a curve changes

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
        own = MagCacheOptions(threshold=threshold, max_skips=max_skips, retention=retention, order=order)
        chosen = own if preset == CUSTOM else PRESETS[preset]
        return joined(skipping, magcache=replace(chosen, rule=rule))


class WanCoreTaylorSeer(io.ComfyNode):
    """Compute every n-th step, forecast between."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreTaylorSeer",
            display_name="WanCore TaylorSeer",
            category="WanCore",
            description="Computes every n-th step and forecasts what the blocks would add in between. Needs no curve.",
            inputs=[
                io.Int.Input(
                    "interval", default=2, min=1, max=50, tooltip="Every how many steps one computes; 1 is all of them."
                ),
                io.Int.Input(
                    "order", default=1, min=0, max=2, tooltip="0 reuses the last residual, 1 and 2 extrapolate."
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
    """Decide while running."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreAdaptiveCache",
            display_name="WanCore Adaptive Cache",
            category="WanCore",
            description="Skips steps by how fast the result is seen to change while it runs. The plan can only show "
            "which steps may be skipped.",
            inputs=[
                io.Float.Input(
                    "threshold",
                    default=0.1,
                    min=0.0,
                    max=10.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="Estimated relative change of the velocity up to which a step is skipped.",
                ),
                io.Int.Input("max_skips", default=3, min=0, max=50, tooltip="Most steps skipped in a row."),
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


class WanCoreGuidanceSchedule(io.ComfyNode):
    """Steps without the unconditional branch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreGuidanceSchedule",
            display_name="WanCore Guidance Schedule",
            category="WanCore",
            description="Leaves the unconditional branch out of some steps, which halves their time.",
            inputs=[
                io.Float.Input(
                    "low",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="No guidance below this share of noise (sigma).",
                ),
                io.Float.Input(
                    "high",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="No guidance above this share of noise (sigma).",
                ),
                io.Int.Input(
                    "every",
                    default=2,
                    min=1,
                    max=50,
                    tooltip="Compute the unconditional branch at every n-th guided step, and reuse the difference "
                    "between the branches at the others. 1 computes it at each.",
                ),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def execute(cls, low: float, high: float, every: int, skipping: SkipOptions | None = None) -> io.NodeOutput:
        return joined(skipping, guidance=GuidanceOptions(low=low, high=high, every=every))


class WanCoreSparseAttention(io.ComfyNode):
    """Self-attention over a part of the keys."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreSparseAttention",
            display_name="WanCore Sparse Attention",
            category="WanCore",
            description="Reads only the blocks of tokens that matter, chosen anew in every layer. Most of the time at "
            "720p is attention; small videos gain nothing. The plan preview shows what every step reads.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*SPARSE_PRESETS, CUSTOM],
                    default="balanced",
                    tooltip="quality, balanced or fast; custom takes the numbers below, which count only then.",
                ),
                io.Float.Input(
                    "sparsity",
                    default=0.75,
                    min=0.0,
                    max=0.99,
                    step=0.05,
                    round=0.0001,
                    tooltip="For custom: the share of the video that a step's attention leaves out. 0.5 is careful, "
                    "0.875 fast.",
                ),
                io.Float.Input(
                    "dense_steps",
                    default=0.05,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.001,
                    tooltip="For custom: share of the steps, from the first on, that read everything. They decide "
                    "where things are.",
                ),
                io.Float.Input(
                    "ramp",
                    default=0.3,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.001,
                    tooltip="For custom: share of the steps, from the first on, that leave out half at most.",
                ),
                io.Int.Input(
                    "dense_layers",
                    default=0,
                    min=0,
                    max=100,
                    tooltip="For custom: so many of the first layers always read everything.",
                ),
                io.Float.Input(
                    "mass",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.001,
                    tooltip="For custom: stop reading where this share of attention is covered, as estimated; at most "
                    "what sparsity says. 0: the same amount for every token. Not with FP8 attention.",
                ),
                io.Boolean.Input(
                    "pooled",
                    default=True,
                    tooltip="For custom: what is left out stands in by its mean. Costs little and keeps quality.",
                ),
                io.Int.Input(
                    "reuse",
                    default=1,
                    min=1,
                    max=50,
                    tooltip="For custom: how many computed steps use one choice of blocks. 1 chooses in every step.",
                ),
                io.Combo.Input(
                    "kernel",
                    options=list(SPARSE_KERNELS),
                    default="auto",
                    tooltip="auto takes the fastest that runs: FP8 where the attention of the loader is FP8 (Hopper).",
                ),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def execute(
        cls,
        preset: str,
        sparsity: float,
        dense_steps: float,
        ramp: float,
        dense_layers: int,
        mass: float,
        pooled: bool,
        reuse: int,
        kernel: str,
        skipping: SkipOptions | None = None,
    ) -> io.NodeOutput:
        own = SparseOptions(
            sparsity=sparsity,
            dense_steps=dense_steps,
            ramp=ramp,
            dense_layers=dense_layers,
            mass=mass or None,
            pooled=pooled,
            reuse=reuse,
        )
        return joined(skipping, sparse=replace(own if preset == CUSTOM else SPARSE_PRESETS[preset], kernel=kernel))


class WanCoreCalibrate(io.ComfyNode):
    """Measure a model's own MagCache curve."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreCalibrate",
            display_name="WanCore Calibrate MagCache",
            category="WanCore",
            description="Runs a few videos in full and keeps how the model's residual changes from step to step: the "
            "curve that MagCache goes by. It is found beside the model from then on.",
            inputs=[
                MODEL.Input("model", tooltip="From the WanCore Model Loader."),
                io.Conditioning.Input("positive", tooltip="An encoded prompt; the curve hardly depends on which."),
                io.Conditioning.Input("negative", tooltip="The encoded negative prompt."),
                io.Latent.Input("latent", tooltip="The size to measure at."),
                io.Int.Input("seed", default=0, min=0, max=2**64 - 1, tooltip="Of the first video."),
                io.Int.Input("videos", default=2, min=1, max=64, tooltip="How many videos to average over."),
                *plan_inputs(),
                io.Combo.Input(
                    "keep",
                    options=[BESIDE, SHOW],
                    default=BESIDE,
                    tooltip="Where the curve goes: beside the model's file, where the sampler finds it, or nowhere.",
                ),
            ],
            outputs=[
                MODEL.Output("model_out", display_name="model", tooltip="The same model, after calibration."),
                io.Image.Output("image", display_name="image", tooltip="The curve, and what each preset would skip."),
                io.String.Output("text", display_name="text", tooltip="What each preset saves with it."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        model: ModelSocket,
        positive: CONDITIONING,
        negative: CONDITIONING,
        latent: dict[str, Any],
        seed: int,
        videos: int,
        steps: int,
        shift: float,
        boundary: float,
        guidance_high: float,
        guidance_low: float,
        solver: str,
        keep: str,
    ) -> io.NodeOutput:
        place = cls._place(model, image="noise_mask" in latent) if keep == BESIDE else None
        check_folder(place)  # before the videos, not after
        plan = plan_of(model, steps, shift, boundary, guidance_high, guidance_low, solver)
        curve = cls._measure(model, plan, positive, negative, latent, seed, videos)
        if place is not None:
            write_curve(curve, place)
        plans = preset_plans(plan, curve)
        words = "\n".join(f"{name}: {skipping.forward_words()}" for name, skipping in plans.items())
        words += "" if place is None else f"\nkept in {place}"
        image = as_image(draw_curve(curve, plans))
        return io.NodeOutput(model, image, words, ui=shown(image, words, cls))

    @staticmethod
    def _place(model: ModelSocket, image: bool) -> Path:
        """Where the curve goes. Raises OptionError for a model that has no file of the user's own."""
        path = model.experts.high.path
        if path is None:
            raise OptionError("this model has no file to keep a curve beside: choose 'only show'")
        if is_embedded(path):
            raise OptionError("the embedded model comes with its curve, which stays: choose 'only show'")
        return curve_path(path, model.experts.task.name, image=image)

    @staticmethod
    def _measure(
        model: ModelSocket,
        plan: Plan,
        positive: CONDITIONING,
        negative: CONDITIONING,
        latent: dict[str, Any],
        seed: int,
        videos: int,
    ) -> Curve:
        conditioning, _ = join(positive, negative, latent, model.experts, plan)
        shape = (1, *latent["samples"].shape[1:])
        tokens, report = model.experts.dit.tokens(*shape[2:]), Report(host.device())
        bar, total = host.Progress(videos * len(plan.steps)), videos * len(plan.steps)
        return measure(
            plan,
            lambda expert: model.acquire(expert, tokens, report),
            ((conditioning, draw_noise(seed + n, shape).to(host.device())) for n in range(videos)),
            source=f"measured on {model.experts.high.source}",
            on_step=lambda done: bar.update(done, total, f"calibrating: step {done} of {total}"),
        )
