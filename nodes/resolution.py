"""Node for the resolution schedule: steps at a part of the video's width and height."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from wan_core.config import SkipOptions, StageOptions

from .schema import schema, widgets
from .skipping import joined, skipping_input, skipping_output


class WanCoreResolutionSchedule(io.ComfyNode):
    """Steps at a part of the video's width and height."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreResolutionSchedule",
            "WanCore Resolution Schedule",
            aliases=("progressive resolution", "jenga", "dynamic resolution", "wan fast"),
            shows_text=True,
            description="Runs some of the high-noise steps at a part of the width and height: at half of both a "
            "quarter of the tokens. The video keeps its size, and details come from the other steps.",
            inputs=[
                *widgets(StageOptions),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def validate_inputs(cls, low: float | None = None, high: float | None = None, every: int | None = None) -> bool:
        if low is not None and high is not None:
            StageOptions(scale=1.0, low=low, high=high, every=every or 0)
        return True

    @classmethod
    def execute(cls, skipping: SkipOptions | None = None, **stage: Any) -> io.NodeOutput:
        before = () if skipping is None else skipping.stages
        return joined(skipping, stages=(*before, StageOptions(**stage)))
