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

from .memory import ModelSocket
from .native_plan import native_plan, of_comfy_samplers
from .plan_inputs import of_the_sampler, plan_of
from .schema import output, schema
from .sockets import CONDITIONING, EITHER_MODEL, REPORT, SKIPPING


class WanCorePlanPreview(io.ComfyNode):
    """Show the steps of a run without running it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCorePlanPreview",
            "WanCore Plan Preview",
            aliases="wan sigmas, wan schedule, steps preview, time estimate, how long",
            description="Shows sigma, expert and guidance of every step, which steps are skipped or read sparsely, and "
            "the estimated time, as text and as a picture, without loading the model. For a MODEL of ComfyUI: those of "
            "its own samplers with WanCore Accelerate.",
            inputs=[
                EITHER_MODEL.Input(
                    "model",
                    tooltip="From the WanCore Model Loader, or a MODEL as it goes to ComfyUI's sampler, after WanCore "
                    "Accelerate; of two experts, the high-noise one. The weights are not loaded.",
                ),
                io.Conditioning.Input(
                    "positive",
                    optional=True,
                    tooltip="What the sampler gets from WanCore Image to Video or WanCore Prompts over Time: shows "
                    "which frames are known pictures, which are the latents before (SVI), and which prompt holds "
                    "where.",
                ),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="What the sampler gets: the length of the video, and for TI2V-5B whether it begins with a "
                    "picture. For a MODEL also the size, for sparse steps.",
                ),
                SKIPPING.Input(
                    "skipping",
                    optional=True,
                    tooltip="Step caching and sparse attention: connect the same as to the sampler.",
                ),
                io.Sigmas.Input("sigmas", optional=True, tooltip="The same as to the sampler, where it has one."),
                io.Model.Input(
                    "model_low",
                    optional=True,
                    tooltip="For a MODEL: the low-noise expert, where a second sampler runs it.",
                ),
            ],
            outputs=[
                output(io.Image, "image", "The plan, drawn."),
                output(io.String, "text", "The plan as a table."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """NaN is never cached: measured times change with every run, and a sampler's settings with every prompt."""
        return float("nan")

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: CONDITIONING | None = None,
        latent: dict[str, Any] | None = None,
        skipping: SkipOptions | None = None,
        sigmas: Tensor | None = None,
        model_low: Any = None,
    ) -> io.NodeOutput:
        graph, node = cls.hidden.prompt, cls.hidden.unique_id
        if not isinstance(model, ModelSocket):
            if positive is not None or skipping is not None:
                raise OptionError(
                    "positive and skipping are for models of the WanCore Model Loader: disconnect them; shift, step "
                    "caching and sparse attention of a MODEL are those of its own nodes"
                )
            values = of_comfy_samplers(graph, node) | {"sigmas": sigmas}
            return cls._shown(*native_plan(model, values, model_low, latent))
        if model_low is not None:
            raise OptionError("model_low is for a MODEL of ComfyUI: disconnect it")
        values = of_the_sampler(graph, node) | {"sigmas": sigmas}
        vae, length = model.experts.vae, dict[str, Any]()
        masks = [extras["concat_mask"] for _, extras in positive or () if extras.get("concat_mask") is not None]
        if masks:
            images = [extras["concat_latent_image"] for _, extras in positive or () if "concat_latent_image" in extras]
            length["frames"] = 4 * masks[0].shape[2] - 3
            length["known"] = known_of(masks[0])
            length["handed"] = handed_of(images[0], masks[0], vae) if images else ()
        if latent is not None:
            length["frames"] = vae.video_frames(latent["samples"].shape[2])
        length["prompt_starts"] = prompt_starts(positive or [])
        plan = plan_of(model, values, skipping, "noise_mask" in (latent or {}), **length)
        return cls._shown(plan, plan.estimate(model.pace))

    @classmethod
    def _shown(cls, plan: Plan, estimate: float | None) -> io.NodeOutput:
        image, text = as_image(draw_plan(plan, estimate)), plan.table()
        lines = "\n".join([*(WARNING + warning for warning in plan.warnings), text.splitlines()[0]])
        return io.NodeOutput(image, text, ui=shown(image, lines, cls))


class WanCoreReport(io.ComfyNode):
    """Show the time and memory of each phase."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreReport",
            "WanCore Report",
            aliases="wan timing, memory used",
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
