"""How far a video with forwards left out is from the full one."""

from __future__ import annotations

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from wan_core.config import OptionError
from wan_core.pipeline.evaluate.compare import MOST_PSNR, compare, find_perceptual
from wan_core.pipeline.evaluate.pictures import side_by_side


class WanCoreCompare(io.ComfyNode):
    """Two videos of one seed, in numbers and side by side."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreCompare",
            display_name="WanCore Quality Comparison",
            category="WanCore",
            description="How near a video is to the one that the full run makes from the same seed: PSNR, SSIM, a "
            "perceptual distance and flicker.",
            inputs=[
                io.Image.Input("full", tooltip="The video of the full run."),
                io.Image.Input("other", tooltip="The video with forwards left out; same seed, size and length."),
                io.String.Input(
                    "caption",
                    default="",
                    optional=True,
                    tooltip="For the embedded model: its prompt. Says whether the video still shows it.",
                ),
            ],
            outputs=[
                io.Image.Output("image", display_name="image", tooltip="Both, and their difference, side by side."),
                io.String.Output("text", display_name="text", tooltip="The numbers."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, full: Tensor, other: Tensor, caption: str = "") -> io.NodeOutput:
        if full.shape != other.shape:
            raise OptionError(
                f"videos of {list(full.shape)} and {list(other.shape)} given; compare two of one size and length"
            )
        name, perceptual = find_perceptual()
        full, other = full[..., :3], other[..., :3]
        found = compare(other, full, caption, perceptual)
        truth = "" if found.truth is None else f"\ncaption {'came true' if found.truth else 'did NOT come true'}"
        same = " (equal)" if found.psnr >= MOST_PSNR else ""
        words = (
            f"PSNR {found.psnr:.2f} dB{same}\nSSIM {found.ssim:.4f}\n{name.upper()} {found.perceptual:.4f}\n"
            f"flicker {found.flicker:+.5f}{truth}"
        )
        sheet = side_by_side({"full": full, "other": other, "difference x4": difference(full, other)})
        return io.NodeOutput(sheet, words, ui=ui.PreviewText(words))


def difference(full: Tensor, other: Tensor) -> Tensor:
    return torch.clamp((full - other).abs() * 4, 0, 1)
