"""What will happen and what did: the plan before a run, the report after it, as text and as a picture."""

from __future__ import annotations

from comfy_api.latest import io

from wan_core.config import SkipOptions
from wan_core.execution.report import Report
from wan_core.execution.report_drawing import draw_report
from wan_core.media.drawing import clock
from wan_core.sampling.plan import Expert
from wan_core.sampling.plan_drawing import draw_plan

from .pictures import as_image, shown
from .sampling import plan_inputs, plan_of, preset_input
from .sockets import MODEL, REPORT, SKIPPING, ModelSocket


class WanCorePlanPreview(io.ComfyNode):
    """The step table, without running it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCorePlanPreview",
            display_name="WanCore Plan Preview",
            category="WanCore",
            description="Every step's sigma, expert and guidance, as text and as a picture, before anything is loaded.",
            inputs=[
                MODEL.Input("model", tooltip="From the WanCore Model Loader. It is not loaded for this."),
                *plan_inputs(),
                io.Float.Input(
                    "seconds_per_forward",
                    default=0.0,
                    min=0.0,
                    max=100000.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="For the estimated time: seconds of one forward of a transformer. 0: as the last run of "
                    "this model measured it, if there was one.",
                ),
                SKIPPING.Input(
                    "skipping", optional=True, tooltip="What is left out of the run: the same as the sampler gets."
                ),
                io.Boolean.Input(
                    "from_image",
                    default=False,
                    optional=True,
                    tooltip="TI2V-5B alone: the video starts from an image, for which MagCache goes by a curve of its "
                    "own.",
                ),
                preset_input(),
            ],
            outputs=[
                io.Image.Output("image", display_name="image", tooltip="The plan, drawn."),
                io.String.Output("text", display_name="text", tooltip="The plan as a table."),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(
        cls,
        model: None = None,
        steps: int = 0,
        shift: float = 0,
        boundary: float = 0,
        guidance_high: float = 0,
        guidance_low: float = 0,
        solver: str = "",
        seconds_per_forward: float = 0,
        skipping: None = None,
        from_image: bool = False,
        preset: str = "auto",
    ) -> float:
        return seconds_per_forward or float("nan")  # a measured pace changes with every run: never cached

    @classmethod
    def execute(
        cls,
        model: ModelSocket,
        steps: int,
        shift: float,
        boundary: float,
        guidance_high: float,
        guidance_low: float,
        solver: str,
        seconds_per_forward: float,
        skipping: SkipOptions | None = None,
        from_image: bool = False,
        preset: str = "auto",
    ) -> io.NodeOutput:
        numbers = steps, shift, boundary, guidance_high, guidance_low, solver
        plan = plan_of(model, *numbers, skipping, from_image, preset)
        given: dict[Expert, float] = dict.fromkeys(plan.experts, seconds_per_forward)
        pace = given if seconds_per_forward else model.pace
        image = as_image(draw_plan(plan, plan.estimate(pace)))
        text = plan.table()
        return io.NodeOutput(image, text, ui=shown(image, text.splitlines()[0], cls))


class WanCoreReport(io.ComfyNode):
    """Where the time and the memory went."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreReport",
            display_name="WanCore Report",
            category="WanCore",
            description="Phases, memory and settings of a run, as text and as a picture.",
            inputs=[
                REPORT.Input("report", tooltip="From the sampler, or from WanCore VAE Decode with decoding in it.")
            ],
            outputs=[
                io.Image.Output("image", display_name="image", tooltip="The report, drawn."),
                io.String.Output("text", display_name="text", tooltip="The report as text."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, report: Report) -> io.NodeOutput:
        image = as_image(draw_report(report))
        text = "\n".join([report.text(), "settings:", *(f"  {line}" for line in report.setting_lines())])
        return io.NodeOutput(image, text, ui=shown(image, f"{clock(report.total_seconds)} in all", cls))
