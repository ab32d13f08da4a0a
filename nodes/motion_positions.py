"""Where S2V places the frames before a clip."""

from __future__ import annotations

from comfy_api.latest import io

from wan_core.models.wan.families.s2v import COMFYUI_POSITIONS

from .schema import schema
from .sockets import CONDITIONING


class WanCoreMotionPositions(io.ComfyNode):
    """ComfyUI's positions of motion frames, for its result."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreMotionPositions",
            "WanCore Motion Positions",
            aliases=("wan s2v", "sound to video", "speech to video"),
            description="For S2V with motion frames (the frames before a clip): where they stand in time and in the "
            "picture. Only needed to get what ComfyUI's own sampling makes.",
            inputs=[
                io.Conditioning.Input(
                    "positive", tooltip="The positive output of WanSoundImageToVideo or WanSoundImageToVideoExtend."
                ),
                io.Combo.Input(
                    "positions",
                    options=["comfyui", "reference"],
                    default="comfyui",
                    tooltip="comfyui: as ComfyUI's own sampling has them. reference: as the released model was "
                    "trained, which is the same as leaving this node out.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(
                    "positive_out", display_name="positive", tooltip="For `positive` of the WanCore Sampler."
                )
            ],
        )

    @classmethod
    def execute(cls, positive: CONDITIONING, positions: str) -> io.NodeOutput:
        asked = positions == "comfyui"
        return io.NodeOutput([[rows, {**extras, COMFYUI_POSITIONS: asked}] for rows, extras in positive])
