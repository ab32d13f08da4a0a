"""Context windows on a model: each forward sees some frames of a long video."""

from __future__ import annotations

from dataclasses import replace

from comfy_api.latest import io, ui

from wan_core.config import FUSE_METHODS, WINDOW_SCHEDULES, OptionError, WindowOptions

from .schema import ADVANCED, newer
from .sockets import MODEL, ModelSocket


class WanCoreContextWindows(io.ComfyNode):
    """Windows of a long video, fused in every step."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreContextWindows",
            display_name="WanCore Context Windows",
            category="WanCore",
            **newer("WanCoreContextWindows"),
            description="Makes a video longer than the model was trained for: each forward sees a window of it, and "
            "the windows are fused in every step. For text to video and image to video.",
            inputs=[
                MODEL.Input("model", tooltip="From the WanCore Model Loader or WanCore LoRA."),
                io.Int.Input(
                    "length",
                    default=81,
                    min=1,
                    max=100001,
                    step=4,
                    tooltip="Frames that a forward sees, a multiple of 4 plus 1. A video that is not longer runs as "
                    "without this node.",
                ),
                io.Int.Input(
                    "overlap",
                    default=28,
                    min=0,
                    max=100000,
                    tooltip="Frames that neighbouring windows share, counted in whole latent frames of 4. More makes "
                    "smoother changes and takes more windows.",
                ),
                io.Combo.Input(
                    "schedule",
                    options=list(WINDOW_SCHEDULES),
                    default="standard_uniform",
                    tooltip="Where the windows are. standard_static: the same in every step, as step caches need. "
                    "standard_uniform: moved from step to step. looped_uniform: also past the end, on to the first "
                    "frames. batched: one after the other, without overlap.",
                ),
                io.Combo.Input(
                    "fuse",
                    options=list(FUSE_METHODS),
                    default="pyramid",
                    tooltip="How much each window counts where several overlap. pyramid and relative: most in its "
                    "middle. flat: all the same. overlap-linear: falling within the overlap alone.",
                ),
                io.Boolean.Input(
                    "freenoise",
                    **ADVANCED,
                    default=True,
                    tooltip="Later frames begin with the noise of earlier ones in another order, so that windows fit "
                    "together better.",
                ),
                io.Boolean.Input(
                    "retain_first_frame",
                    **ADVANCED,
                    default=False,
                    tooltip="For image to video: every window sees the first frame's image in its first place.",
                ),
                io.Boolean.Input(
                    "closed_loop",
                    **ADVANCED,
                    default=False,
                    tooltip="For looped_uniform: a window also joins the last frame to the first.",
                ),
            ],
            outputs=[
                MODEL.Output("model_out", display_name="model", tooltip="For the WanCore Sampler and the Plan Preview.")
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        length: int | None = None,
        overlap: int | None = None,
        schedule: str | None = None,
        fuse: str | None = None,
        closed_loop: bool | None = None,
    ) -> bool:
        if not (length is None or overlap is None or schedule is None or fuse is None or closed_loop is None):
            _options(length, overlap, schedule, fuse, closed_loop)
        return True

    @classmethod
    def execute(
        cls,
        model: ModelSocket,
        length: int,
        overlap: int,
        schedule: str,
        fuse: str,
        freenoise: bool = True,
        retain_first_frame: bool = False,
        closed_loop: bool = False,
    ) -> io.NodeOutput:
        windows = _options(length, overlap, schedule, fuse, closed_loop)
        windows = replace(windows, freenoise=freenoise, retain_first=retain_first_frame)
        return io.NodeOutput(replace(model, windows=windows), ui=ui.PreviewText(windows.words()))


def _options(length: int, overlap: int, schedule: str, fuse: str, closed_loop: bool) -> WindowOptions:
    """Raises OptionError."""
    if length % 4 != 1:
        raise OptionError(f"length {length} given; a window has a multiple of 4 plus 1 frames (81)")
    length, overlap = (length - 1) // 4 + 1, overlap // 4
    return WindowOptions(length=length, overlap=overlap, schedule=schedule, fuse=fuse, closed_loop=closed_loop)
