"""Node that measures a model's MagCache curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io  # pyright: ignore[reportMissingImports]

from wan_core.config import OptionError
from wan_core.config.outputs import Outputs, keep_old
from wan_core.execution.report import Report
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.memory_planning import Workload
from wan_core.sampling.cache.magcache import CURVE_FILES, Curve, curve_path
from wan_core.sampling.calibration_files import is_embedded
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.plan import Plan
from wan_lab.calibrate import measure_curve
from wan_lab.pictures import draw_curve, preset_plans

from . import host
from .conditioning import on_device
from .plan_inputs import plan_inputs, plan_of
from .report import as_image, shown
from .schema import output, schema
from .sockets import CONDITIONING, MODEL, ModelSocket

BESIDE, SHOW = "save beside the model", "only show"


class WanCoreCalibrate(io.ComfyNode):
    """Measure a model's MagCache curve."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreCalibrate",
            "WanCore Calibrate MagCache",
            aliases=("magcache calibration", "magcache ratios"),
            description="Runs a few videos in full and measures how the magnitude of the model's residual changes from "
            "step to step: the curve that MagCache needs. Saved beside the model, it is found automatically.",
            inputs=[
                MODEL.Input("model", tooltip="From the WanCore Model Loader."),
                io.Conditioning.Input("positive", tooltip="An encoded prompt; the curve depends little on the prompt."),
                io.Conditioning.Input("negative", tooltip="The encoded negative prompt."),
                io.Latent.Input("latent", tooltip="The video size to measure at."),
                io.Int.Input("seed", default=0, min=0, max=2**64 - 1, tooltip="The seed of the first video."),
                io.Int.Input("videos", default=2, min=1, max=64, tooltip="Number of videos to average over."),
                *plan_inputs(),
                io.Combo.Input(
                    "keep",
                    options=[BESIDE, SHOW],
                    default=BESIDE,
                    tooltip="Save the curve beside the model's file, where the sampler finds it, or only show it.",
                ),
            ],
            outputs=[
                output(MODEL, "model_out", "The same model, after calibration."),
                output(io.Image, "image", "The curve, and the steps that each preset would skip."),
                output(io.String, "text", "The forwards that each preset saves with this curve."),
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
        keep: str,
        **values: Any,
    ) -> io.NodeOutput:
        if model.windows is not None:
            raise OptionError("a curve is measured on a video in one piece: connect the model without context windows")
        path = cls._curve_path(model, image="noise_mask" in latent) if keep == BESIDE else None
        video, older = plan_of(model, values), None
        plan = video.plan
        with Outputs({}) as outputs:
            if path is not None:  # before the videos are made, not after
                outputs.add("the curve", path, overwrite=True)
            curve = cls._measure(model, plan, positive, negative, latent, seed, videos)
            if path is not None:
                # The new curve takes the name where it is found; the older one may have been tuned by hand.
                older = keep_old(path)
                CURVE_FILES.write(curve, path)
        plans = preset_plans(plan, curve)
        text = "\n".join(f"{name}: {skipping.forward_words()}" for name, skipping in plans.items())
        text += "" if path is None else f"\nsaved as {path}"
        text += "" if older is None else f"\nthe older curve is kept as {older}"
        image = as_image(draw_curve(curve, plans))
        return io.NodeOutput(model, image, text, ui=shown(image, text, cls))

    @staticmethod
    def _curve_path(model: ModelSocket, image: bool) -> Path:
        """The path of the curve beside the model. Raises OptionError for the embedded model and random weights."""
        path = model.experts.high.path
        if path is None:
            raise OptionError("this model has no file to save a curve beside: choose 'only show'")
        if is_embedded(path):
            raise OptionError("the curve of the embedded model cannot be replaced: choose 'only show'")
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
        joined = join(positive, negative, latent, model.experts, plan, model.range_shift)
        conditioning = on_device(joined.conditioning)
        shape = (1, *latent["samples"].shape[1:])
        workload, report = Workload(shape, joined.plan, batched=False), Report(host.device())
        owner = model.engine.owner(model, workload, report)
        bar, total = host.Progress(videos * len(plan.steps)), videos * len(plan.steps)
        return measure_curve(
            joined.plan,
            owner.acquire,
            ((conditioning, draw_noise(seed + n, shape).to(host.device())) for n in range(videos)),
            source=f"measured on {model.experts.high.source}",
            on_block=host.check_interruption,
            on_step=lambda done: bar.update(done, total, f"calibrating: step {done} of {total}"),
        )
