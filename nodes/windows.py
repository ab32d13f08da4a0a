"""Context windows on a model: each forward sees some frames of a long video."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io, ui

from wan_core.config import OptionError, WindowOptions

from .memory import ModelSocket
from .schema import output, schema, widgets
from .sockets import MODEL

WIDGETS = (
    "length",
    "overlap",
    "schedule",
    "fuse",
    "freenoise",
    "retain_first",
    "closed_loop",
    "split",
)  # their order is frozen
SPLIT = "split_conds_to_windows"  # ComfyUI's name


class WanCoreContextWindows(io.ComfyNode):
    """Windows of a long video, fused in every step."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreContextWindows",
            "WanCore Context Windows",
            aliases=("context windows", "long video", "wan context windows", "freenoise"),
            shows_text=True,
            description="Makes a video longer than the model was trained for: each forward sees a window of it, and "
            "the windows are fused in every step. For text to video and image to video.",
            inputs=[
                MODEL.Input("model", tooltip="From the WanCore Model Loader or WanCore LoRA."),
                *widgets(WindowOptions, *WIDGETS, retain_first={"id": "retain_first_frame"}, split={"id": SPLIT}),
            ],
            outputs=[output(MODEL, "model_out", "For the WanCore Sampler and the Plan Preview.")],
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
            _options(length, overlap, schedule=schedule, fuse=fuse, closed_loop=closed_loop)
        return True

    @classmethod
    def execute(cls, model: ModelSocket, retain_first_frame: bool = False, **values: Any) -> io.NodeOutput:
        windows = _options(retain_first=retain_first_frame, split=values.pop(SPLIT, False), **values)
        return io.NodeOutput(replace(model, windows=windows), ui=ui.PreviewText(windows.words()))


def _options(length: int, overlap: int, **others: Any) -> WindowOptions:
    """Raises OptionError."""
    if length % 4 != 1:
        raise OptionError(f"length {length} given; a window has a multiple of 4 plus 1 frames (81)")
    return WindowOptions(length=(length - 1) // 4 + 1, overlap=overlap // 4, **others)
