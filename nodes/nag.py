"""Normalized attention guidance: a negative prompt where guidance is 1."""

from __future__ import annotations

from comfy_api.latest import io

from wan_core.config import NagOptions
from wan_core.models.wan.families import NAG

from .schema import schema, widgets
from .sockets import CONDITIONING


class WanCoreNAG(io.ComfyNode):
    """A negative prompt that counts without a second forward."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreNAG",
            "WanCore NAG",
            aliases=("nag", "normalized attention guidance", "negative prompt", "cfg 1"),
            shows_text=True,
            description="Lets a negative prompt count in steps whose guidance is 1, as with four-step LoRAs: inside "
            "cross-attention (normalized attention guidance), which then runs once more.",
            inputs=[
                io.Conditioning.Input("negative", tooltip="The encoded negative prompt."),
                *widgets(NagOptions),
            ],
            outputs=[
                io.Conditioning.Output(
                    "negative_out", display_name="negative", tooltip="For `negative` of the WanCore Sampler."
                )
            ],
        )

    @classmethod
    def execute(cls, negative: CONDITIONING, **numbers: float) -> io.NodeOutput:
        nag = NagOptions(**numbers)
        return io.NodeOutput([[rows, {**extras, NAG: nag}] for rows, extras in negative])
