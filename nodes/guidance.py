"""Steps that do without the unconditional branch."""

from __future__ import annotations

from comfy_api.latest import io

from wan_core.config import GuidanceOptions, SkipOptions

from .skipping import joined, skipping_input, skipping_output


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
