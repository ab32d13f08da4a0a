"""Node that compares a video with that of the full run."""

from __future__ import annotations

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from wan_core.config import OptionError
from wan_lab.compare import MOST_PSNR, compare, find_perceptual
from wan_lab.pictures import side_by_side

from .schema import output, schema


class WanCoreCompare(io.ComfyNode):
    """Compare two videos of one seed, in numbers and side by side."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreCompare",
            "WanCore Quality Comparison",
            aliases=("compare videos", "psnr", "quality"),
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
        sheet = side_by_side({"full": full, "other": other, "difference x4": difference(full, other)})
        return io.NodeOutput(sheet, text, ui=ui.PreviewText(text))


def difference(full: Tensor, other: Tensor) -> Tensor:
    return torch.clamp((full - other).abs() * 4, 0, 1)
