"""Node for the resolution schedule: steps at a part of the video's width and height."""

from __future__ import annotations

from comfy_api.latest import io

from wan_core.config import STAGE_POSITIONS, SkipOptions, StageOptions

from .schema import ADVANCED, newer
from .skipping import joined, skipping_input, skipping_output


class WanCoreResolutionSchedule(io.ComfyNode):
    """Steps at a part of the video's width and height."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreResolutionSchedule",
            display_name="WanCore Resolution Schedule",
            category="WanCore",
            **newer("WanCoreResolutionSchedule"),
            description="Runs some of the high-noise steps at a part of the width and height: at half of both a "
            "quarter of the tokens. The video keeps its size, and details come from the other steps.",
            inputs=[
                io.Float.Input(
                    "scale",
                    default=0.5,
                    min=0.25,
                    max=1.0,
                    step=0.05,
                    round=0.0001,
                    tooltip="Part of the width and height at which the steps below run. 0.75 is careful, 0.5 is fast.",
                ),
                io.Float.Input(
                    "low",
                    default=0.9,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="Steps below this sigma (share of noise) run at full size: details come from them.",
                ),
                io.Float.Input(
                    "high",
                    default=0.98,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="Steps above this sigma (share of noise) run at full size: the layout comes from them.",
                ),
                io.Combo.Input(
                    "positions",
                    **ADVANCED,
                    options=list(STAGE_POSITIONS),
                    default="video",
                    optional=True,
                    tooltip="Rotary positions of rows and columns in smaller steps. video: those of the video, further "
                    "apart. own: counted from 0, as in a video of that size.",
                ),
                io.Int.Input(
                    "every",
                    **ADVANCED,
                    default=3,
                    min=0,
                    max=50,
                    optional=True,
                    tooltip="Every n-th of these steps runs at full size all the same, which brings the details up to "
                    "date. 0: none.",
                ),
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
    def execute(
        cls,
        scale: float,
        low: float,
        high: float,
        positions: str = "video",
        every: int = 0,
        skipping: SkipOptions | None = None,
    ) -> io.NodeOutput:
        before = () if skipping is None else skipping.stages
        stage = StageOptions(scale=scale, low=low, high=high, positions=positions, every=every)
        return joined(skipping, stages=(*before, stage))
