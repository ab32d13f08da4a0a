"""Node for the guidance schedule: steps without the unconditional branch."""

from __future__ import annotations

from comfy_api.latest import io

from wan_core.config import GuidanceOptions, SkipOptions

from .schema import newer
from .skipping import joined, skipping_input, skipping_output


class WanCoreGuidanceSchedule(io.ComfyNode):
    """Steps without the unconditional branch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreGuidanceSchedule",
            display_name="WanCore Guidance Schedule",
            category="WanCore",
            **newer("WanCoreGuidanceSchedule"),
            description="Runs some steps without the unconditional branch, which halves their time.",
            inputs=[
                io.Float.Input(
                    "low",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="No guidance in steps below this sigma (share of noise).",
                ),
                io.Float.Input(
                    "high",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="No guidance in steps above this sigma (share of noise).",
                ),
                io.Int.Input(
                    "every",
                    default=2,
                    min=1,
                    max=50,
                    tooltip="Compute the unconditional branch at every n-th guided step; the other guided steps reuse "
                    "the difference between the branches. 1 computes it at every step.",
                ),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def validate_inputs(cls, low: float | None = None, high: float | None = None) -> bool:
        if low is not None and high is not None:
            GuidanceOptions(low=low, high=high)
        return True

    @classmethod
    def execute(cls, low: float, high: float, every: int, skipping: SkipOptions | None = None) -> io.NodeOutput:
        return joined(skipping, guidance=GuidanceOptions(low=low, high=high, every=every))
