"""Normalized attention guidance: a negative prompt where guidance is 1."""

from __future__ import annotations

from comfy_api.latest import io

from wan_core.config import NagOptions
from wan_core.models.wan.families import NAG

from .schema import newer
from .sockets import CONDITIONING


class WanCoreNAG(io.ComfyNode):
    """A negative prompt that counts without a second forward."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        usual = NagOptions()
        return io.Schema(
            node_id="WanCoreNAG",
            display_name="WanCore NAG",
            category="WanCore",
            **newer("WanCoreNAG"),
            description="Lets a negative prompt count in steps whose guidance is 1, as with four-step LoRAs: inside "
            "cross-attention (normalized attention guidance), which then runs once more.",
            inputs=[
                io.Conditioning.Input("negative", tooltip="The encoded negative prompt."),
                io.Float.Input(
                    "scale",
                    default=usual.scale,
                    min=1.0,
                    max=100.0,
                    step=0.1,
                    round=0.001,
                    tooltip="How far attention moves away from the negative prompt. 11 is usual for Wan; 1 has no "
                    "effect.",
                ),
                io.Float.Input(
                    "tau",
                    default=usual.tau,
                    min=1.0,
                    max=10.0,
                    step=0.1,
                    round=0.001,
                    tooltip="The result may be at most this many times as large as without. 2.5 is usual for Wan.",
                ),
                io.Float.Input(
                    "alpha",
                    default=usual.alpha,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=0.001,
                    tooltip="Share of the guided result; the rest is what it was. 0.25 is usual for Wan; 0 has no "
                    "effect.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(
                    "negative_out", display_name="negative", tooltip="For `negative` of the WanCore Sampler."
                )
            ],
        )

    @classmethod
    def execute(cls, negative: CONDITIONING, scale: float, tau: float, alpha: float) -> io.NodeOutput:
        nag = NagOptions(scale=scale, tau=tau, alpha=alpha)
        return io.NodeOutput([[rows, {**extras, NAG: nag}] for rows, extras in negative])
