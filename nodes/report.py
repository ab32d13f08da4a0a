"""Nodes that show the plan before a run and the report after it, as text and as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui  # pyright: ignore[reportMissingImports]
from PIL import Image
from torch import Tensor

from wan_core.config import OptionError, SkipOptions
from wan_core.execution.report import WARNING, Report, draw_report
from wan_core.media.pictures import clock
from wan_core.models.wan.families.wan.inputs import handed_of, known_of
from wan_core.pipeline.comfy_conditioning import prompt_starts
from wan_core.sampling.plan import Plan
from wan_core.sampling.plan_drawing import draw_plan
from wan_core.sampling.steps import Expert

from .memory import ModelSocket
from .native_plan import native_inputs, native_plan, of_comfy_samplers
from .plan_inputs import (
    ENTERED,
    LAST,
    OF_THE_SAMPLER,
    added_inputs,
    check_window,
    of_the_sampler,
    plan_inputs,
    plan_of,
    preset_input,
    settings_input,
    speed_input,
    window_inputs,
)
from .schema import ADVANCED, output, schema
from .sockets import CONDITIONING, EITHER_MODEL, REPORT, SKIPPING


class WanCorePlanPreview(io.ComfyNode):
    """Show the steps of a run without running it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCorePlanPreview",
            "WanCore Plan Preview",
            aliases=("wan sigmas", "wan schedule", "steps preview", "time estimate", "how long"),
            description="Shows sigma, expert and guidance of every step, which steps are skipped or read sparsely, and "
            "the estimated time, as text and as a picture, without loading the model. For a MODEL of ComfyUI: those of "
            "its own samplers with WanCore Accelerate.",
            inputs=[
                EITHER_MODEL.Input(
                    "model",
                    tooltip="From the WanCore Model Loader, or a MODEL as it goes to ComfyUI's sampler, after WanCore "
                    "Accelerate; of two experts, the high-noise one. The weights are not loaded.",
                ),
                *plan_inputs(),
                io.Float.Input(
                    "seconds_per_forward",
                    **ADVANCED,
                    default=0.0,
                    min=0.0,
                    max=100000.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="Seconds of one forward of a transformer, for the time estimate. 0: as measured in the "
                    "last run of this model, if there was one.",
                ),
                SKIPPING.Input(
                    "skipping",
                    optional=True,
                    tooltip="Step caching and sparse attention: connect the same as to the sampler.",
                ),
                io.Boolean.Input(
                    "from_image",
                    **ADVANCED,
                    default=False,
                    optional=True,
                    tooltip="For TI2V-5B only: the video starts from an image, for which MagCache has a separate "
                    "curve.",
                ),
                *preset_input(),
                *window_inputs(),
                io.Int.Input(
                    "frames",
                    **ADVANCED,
                    default=0,
                    min=0,
                    max=100000,
                    optional=True,
                    tooltip="Of a video that is made clip by clip: shows how many clips, and the time of all. "
                    "0: one clip, of the model's own length.",
                ),
                io.Int.Input(
                    "clip_frames",
                    **ADVANCED,
                    default=0,
                    min=0,
                    max=1001,
                    optional=True,
                    tooltip="Of a clip, a multiple of 4 plus 1. 0: the model's own.",
                ),
                io.Int.Input(
                    "overlap",
                    **ADVANCED,
                    default=0,
                    min=0,
                    max=13,
                    optional=True,
                    tooltip="So many of them are the last frames of the clip before. 0: the model's own.",
                ),
                io.Conditioning.Input(
                    "positive",
                    optional=True,
                    tooltip="What the sampler gets from WanCore Image to Video or WanCore Prompts over Time: shows "
                    "which frames are known pictures, which are the latents before (SVI), and which prompt holds "
                    "where.",
                ),
                settings_input(),
                *added_inputs(),
                *native_inputs(),
                *speed_input(),
            ],
            outputs=[
                output(io.Image, "image", "The plan, drawn."),
                output(io.String, "text", "The plan as a table."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(
        cls, denoise: float | None = 1.0, start_step: int | None = 0, end_step: int | None = LAST
    ) -> bool:
        return check_window(denoise, start_step, end_step)

    @classmethod
    def fingerprint_inputs(cls, seconds_per_forward: float = 0, settings: str = ENTERED, **_: Any) -> float:
        """NaN is never cached: measured times change with every run, and a sampler's settings with every prompt."""
        return (seconds_per_forward or float("nan")) if settings == ENTERED else float("nan")

    @classmethod
    def execute(
        cls,
        model: Any,
        seconds_per_forward: float,
        skipping: SkipOptions | None = None,
        from_image: bool = False,
        frames: int = 0,
        clip_frames: int = 0,
        overlap: int = 0,
        positive: CONDITIONING | None = None,
        settings: str = ENTERED,  # prompts from before it was an input
        model_low: Any = None,
        latent: dict[str, Any] | None = None,
        **values: Any,
    ) -> io.NodeOutput:
        if not isinstance(model, ModelSocket):
            if settings == OF_THE_SAMPLER:
                values |= of_comfy_samplers(cls.hidden.prompt, cls.hidden.unique_id)
            values |= {"skipping": skipping, "from_image": from_image, "frames": frames, "clip_frames": clip_frames}
            values |= {"overlap": overlap, "positive": positive}
            plan, estimate = native_plan(model, values, model_low, latent, seconds_per_forward)
            return cls._shown(plan, estimate)
        if model_low is not None or latent is not None:
            raise OptionError("model_low and latent are for a MODEL of ComfyUI: disconnect them")
        if settings == OF_THE_SAMPLER:
            values |= of_the_sampler(cls.hidden.prompt, cls.hidden.unique_id) or {}
        cut = bool(frames or clip_frames or overlap)
        length = {"frames": frames or None, "clip_frames": clip_frames or None, "overlap": overlap or None, "cut": cut}
        masks = [extras["concat_mask"] for _, extras in positive or () if extras.get("concat_mask") is not None]
        if masks:
            length["frames"] = length["frames"] or 4 * masks[0].shape[2] - 3
            length["known"] = known_of(masks[0])
            images = [extras["concat_latent_image"] for _, extras in positive or () if "concat_latent_image" in extras]
            length["handed"] = handed_of(images[0], masks[0], model.experts.vae) if images else ()
        length["prompt_starts"] = prompt_starts(positive or [])
        video = plan_of(model, values, skipping, from_image, **length)
        plan, clips = video.plan, video.long.words(video.plan.count) if cut else ""
        entered: dict[Expert, float] = dict.fromkeys(plan.experts, seconds_per_forward)
        estimate = plan.estimate(entered if seconds_per_forward else model.pace)
        estimate = None if estimate is None else estimate * video.long.cost
        return cls._shown(plan, estimate, clips)

    @classmethod
    def _shown(cls, plan: Plan, estimate: float | None, clips: str = "") -> io.NodeOutput:
        image = as_image(draw_plan(plan, estimate, clips=clips))
        text = plan.table() + (f"\nclips: {clips}" if clips else "")
        lines = "\n".join([*(WARNING + warning for warning in plan.warnings), text.splitlines()[0]])
        return io.NodeOutput(image, text, ui=shown(image, lines, cls))


class WanCoreReport(io.ComfyNode):
    """Show the time and memory of each phase."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreReport",
            "WanCore Report",
            aliases=("wan timing", "memory used"),
            description="Phases, memory and settings of a run, as text and as a picture.",
            inputs=[
                REPORT.Input("report", tooltip="From the sampler, or from WanCore VAE Decode, which adds the decoding.")
            ],
            outputs=[
                output(io.Image, "image", "The report, drawn."),
                output(io.String, "text", "The report as text."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, report: Report) -> io.NodeOutput:
        image = as_image(draw_report(report))
        text = "\n".join([report.text(), "settings:", *(f"  {line}" for line in report.setting_lines())])
        lines = "\n".join([*report.warning_lines(), f"{clock(report.total_seconds)} in all"])
        return io.NodeOutput(image, text, ui=shown(image, lines, cls))


def shown(image: Tensor, text: str, cls: type[io.ComfyNode]) -> dict[str, Any]:
    """A picture and text on the node."""
    return {**ui.PreviewImage(image, cls=cls).as_dict(), **ui.PreviewText(text).as_dict()}


def as_image(picture: Image.Image) -> Tensor:
    """[1, H, W, 3] in 0..1."""
    return torch.from_numpy(np.asarray(picture).astype(np.float32) / 255)[None]
