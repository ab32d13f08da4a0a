"""Nodes that measure: a video against that of the full run, and a report card of the words of speed, with their seconds
and quality on this model and machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from wan_core.config import OptionError, Request, SkipOptions
from wan_core.config.changes import stamps
from wan_core.config.checks import check_size
from wan_core.config.limits import MAX_VIDEO_SIDE
from wan_core.config.outputs import Outputs
from wan_core.execution.report import Report
from wan_core.media.video import load_image
from wan_core.models.vae.config import VAE_21
from wan_core.sampling.conditioning import empty_latents
from wan_core.sampling.plan import MAX_STEPS, Plan
from wan_lab.card import card_settings, card_size, make_card
from wan_lab.compare import MOST_PSNR, compare, find_perceptual
from wan_lab.pictures import side_by_side
from wan_lab.samples import Sample, choose_samples, drawn_media

from . import host
from .conditioning import WAN, WanCoreImageToVideo
from .memory import ModelSocket
from .plan_inputs import plan_of
from .prompts import CLIP, WanCoreTextEncode
from .report import as_image, shown
from .sampling import WanCoreSampler
from .schema import ADVANCED, output, schema
from .sockets import CONDITIONING, MODEL
from .video import WanCoreVAEDecode
from .video_inputs import MAX_FRAMES, check_room


class WanCoreCompare(io.ComfyNode):
    """Compare two videos of one seed, in numbers and side by side."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreCompare",
            "WanCore Quality Comparison",
            aliases="compare videos, psnr, quality",
            description="Compares a video with the full run's video of the same seed: PSNR, SSIM, a perceptual "
            "distance and flicker.",
            inputs=[
                io.Image.Input("full", tooltip="The video of the full run."),
                io.Image.Input(
                    "other", tooltip="The video with step caching or sparse attention; same seed, size and length."
                ),
                io.String.Input(
                    "caption",
                    default="",
                    optional=True,
                    tooltip="The prompt of a video of the embedded model: the node checks whether the video shows it.",
                ),
            ],
            outputs=[
                output(io.Image, "image", "Both videos and their difference, side by side."),
                output(io.String, "text", "The measured numbers."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, full: Tensor, other: Tensor, caption: str = "") -> io.NodeOutput:
        if full.shape != other.shape:
            raise OptionError(
                f"videos of {list(full.shape)} and {list(other.shape)} given; both must have the same size and length"
            )
        name, perceptual = find_perceptual()
        full, other = full[..., :3].float(), other[..., :3].float()
        result = compare(other, full, caption, perceptual)
        truth = "" if result.truth is None else f"\ncaption {'matches' if result.truth else 'does NOT match'}"
        same = " (equal)" if result.psnr >= MOST_PSNR else ""
        text = (
            f"PSNR {result.psnr:.2f} dB{same}\nSSIM {result.ssim:.4f}\n{name.upper()} {result.perceptual:.4f}\n"
            f"flicker {result.flicker:+.5f}{truth}"
        )
        sheet = side_by_side({"full": full, "other": other, "difference x4": ((full - other).abs() * 4).clamp(0, 1)})
        return io.NodeOutput(sheet, text, ui=ui.PreviewText(text))


SIDE = 16  # of which all models' widths and heights are multiples
OWN_SIZE = "0: {own}, of the embedded model its own."


class WanCoreReportCard(io.ComfyNode):
    """Measure the words of speed on a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreReportCard",
            "WanCore Report Card",
            aliases="benchmark, speed test, report card, quality",
            description="Makes three videos in full and at each word of speed, and writes seconds, memory and the "
            "distance from the full run as a Markdown file and a picture that can be posted.",
            inputs=[
                MODEL.Input("model", tooltip="From the WanCore Model Loader, with LoRAs if there are any."),
                CLIP,
                io.Vae.Input("vae", tooltip="The VAE that belongs to the model: WanCore's or ComfyUI's own."),
                _number("width", MAX_VIDEO_SIDE, 16, OWN_SIZE.format(own="832")),
                _number("height", MAX_VIDEO_SIDE, 16, OWN_SIZE.format(own="480")),
                _number("frames", MAX_FRAMES, 1, "4n + 1. 0: the model's own; fewer where they do not fit."),
                _number("steps", MAX_STEPS, 1, "0: the model's own."),
                _number("seed", 2**64 - 1, 1, "Of the first video; it increases by 1 for each video."),
                io.String.Input(
                    "prompts",
                    multiline=True,
                    default="",
                    tooltip="One prompt a line. Empty: three of WanCore's own.",
                ),
                io.Boolean.Input("with_prompts", default=False, tooltip="Write the prompts into the card."),
                io.Image.Input(
                    "image", optional=True, tooltip="The first frame of all videos, for models that take one."
                ),
                io.ClipVisionOutput.Input(
                    "clip_vision_output",
                    **ADVANCED,
                    optional=True,
                    tooltip="Of that image, for Wan 2.1 image-to-video.",
                ),
            ],
            outputs=[
                output(io.Image, "image_out", "Frames of all videos, under what was measured of each."),
                output(io.String, "text", "The card as Markdown."),
            ],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, width: int | None = None, height: int | None = None, frames: int | None = None) -> bool:
        if width is not None and height is not None:
            if bool(width) != bool(height):
                raise OptionError(f"width {width} and height {height} given: set both, or leave both at 0")
            check_size(width or SIDE, height or SIDE, frames or 1, multiple=SIDE)
        return check_room(WAN, VAE_21, (width or None, height or None, frames or None), before_run=True)

    @classmethod
    def execute(
        cls,
        model: ModelSocket,
        clip: Any,
        vae: Any,
        width: int,
        height: int,
        frames: int,
        steps: int,
        seed: int,
        prompts: str,
        with_prompts: bool,
        image: Tensor | None = None,
        clip_vision_output: Any = None,
    ) -> io.NodeOutput:
        task = model.experts.task
        tiny = task.name.endswith("-tiny")
        cls.validate_inputs(width, height)  # what came through a link
        wide, high = card_size(task, width or None, height or None)
        if task.image == "channels" and image is None and not tiny:
            raise OptionError(f"{task.name} makes videos from an image: connect one")
        if task.image == "none" and image is not None:
            raise OptionError(f"{task.name} takes no image: leave it out")
        size = wide or task.width, high or task.height, frames or task.frames
        lines = [line.strip() for line in prompts.splitlines() if line.strip()]
        samples = choose_samples(lines, len(lines) or 3, seed, tiny)
        maker = NodeMaker(
            model, clip, vae, samples, size, {"steps": steps, "preset": "auto"}, image, clip_vision_output
        )
        with Outputs({}) as outputs:
            text, picture, _ = make_card(
                maker,
                samples,
                card_settings(),
                size,
                host.device(),
                host.output_folder(),
                outputs,
                host.reporter(),
                maker.identity(),
                with_prompts,
            )
        pixels = as_image(picture)
        return io.NodeOutput(pixels, text, ui=shown(pixels, text, cls))


def _number(name: str, most: int, step: int, tooltip: str) -> Any:
    return io.Int.Input(name, default=0, min=0, max=most, step=step, tooltip=tooltip)


@dataclass
class NodeMaker:
    """Makes the videos of a card by the nodes that a user would connect. values: of the sampler's inputs."""

    model: ModelSocket
    clip: Any
    vae: Any
    samples: Sequence[Sample]
    size: tuple[int, int, int]
    values: dict[str, Any]
    image: Tensor | None
    vision: Any

    def identity(self) -> object:
        """Decides with the settings of a card which videos are its own."""
        model = self.model
        files = stamps(part.path for part in model.experts.of.values() if part.path is not None)
        loras = {name: [(one.key, one.strength) for one in lora_files] for name, lora_files in model.loras.items()}
        parts = [getattr(part, "file", type(part).__name__) for part in (self.clip, self.vae)]
        pixels = b"" if self.image is None else self.image.cpu().float().numpy().tobytes()
        return model.options, files, loras, parts, hashlib.sha256(pixels).hexdigest(), self.values, model.shift

    def plan(self, skip: SkipOptions | None, frames: int) -> Plan:
        width, height, _ = self.size
        first = self.model.experts.task.image == "first frame" and self.image is not None
        return plan_of(self.model, self.values, skip, first, width=width, height=height, frames=frames)

    def forward_seconds(self, frames: int) -> float:
        """Seconds of the first step, run a second time: the first brings the weights to the device."""
        for _ in range(2):
            self._sample(self.samples[0], None, frames, end_step=1)
        return next(iter(self.model.pace.values()))

    def make(self, sample: Sample, skip: SkipOptions | None, frames: int) -> tuple[Tensor, Report]:
        latent, report = self._sample(sample, skip, frames)
        images, report = WanCoreVAEDecode.execute(self.vae, latent, "auto", report).result
        return (images.cpu().float() * 255).round().clamp(0, 255).byte(), report

    def _sample(self, sample: Sample, skip: SkipOptions | None, frames: int, **window: int) -> Any:
        negative = self.model.experts.task.negative_prompt
        texts = WanCoreTextEncode.execute(self.clip, sample.caption, negative).result
        *texts, latent = self._with_image(sample, *texts, frames)
        values = {**self.values, **window}
        return WanCoreSampler.execute(self.model, *texts, latent, sample.seed, "auto", skip, **values).result

    def _with_image(self, sample: Sample, positive: CONDITIONING, negative: CONDITIONING, frames: int) -> Any:
        width, height, _ = self.size
        task, image = self.model.experts.task, self.image
        if image is None and task.image == "channels":  # the embedded model, whose first frames are drawn
            with drawn_media(task.name, Request(prompt="", width=width, height=height), sample) as filled:
                image = torch.from_numpy(load_image(filled.image or ""))[None]
        if image is None:
            samples = host.to_intermediate(empty_latents(self.model.experts.vae, width, height, frames))
            return positive, negative, {"samples": samples}
        texts = {"positive": positive, "negative": negative}
        size = {"width": width, "height": height, "frames": frames}
        pictures = {"first_image": image[:1], "clip_vision_output": self.vision}
        return WanCoreImageToVideo.execute(vae=self.vae, **texts, **size, **pictures).result
