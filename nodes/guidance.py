"""Node for the guidance schedule: steps without the unconditional branch."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from wan_core.config import GuidanceOptions, SkipOptions

from .schema import schema, widgets
from .skipping import joined, skipping_input, skipping_output


class WanCoreGuidanceSchedule(io.ComfyNode):
    """Steps without the unconditional branch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreGuidanceSchedule",
            "WanCore Guidance Schedule",
            aliases=("cfg schedule", "cfg zero", "skip cfg", "guidance"),
            shows_text=True,
            description="Runs some steps without the unconditional branch, which halves their time.",
            inputs=[
                *widgets(GuidanceOptions),
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
    def execute(cls, skipping: SkipOptions | None = None, **numbers: Any) -> io.NodeOutput:
        return joined(skipping, guidance=GuidanceOptions(**numbers))
