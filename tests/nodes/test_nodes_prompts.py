"""WanCore Prompts over Time in a running ComfyUI: the video of the command line, the plan's picture, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.comfyui import ComfyUI, Graph, Refused
from tools.embedded_graphs import node, text_to_video
from wan_core.config import LoadOptions, PromptAt, Request
from wan_core.media.video import read_video
from wan_core.pipeline.pipeline import Pipeline

pytestmark = pytest.mark.comfy

RED, GREEN = "a red circle moving right on a blue background", "a green circle moving right on a blue background"
SIZE = {"width": 48, "height": 48, "frames": 17}
SCENES = PromptAt(frame=0, text=RED), PromptAt(frame=8, text=GREEN)


def graph(prompts: str = f"0: {RED}\n8: {GREEN}", whole: str = "", **sampling: Any) -> Graph:
    nodes = text_to_video(SIZE, **{"steps": 3, "positive": ["prompts", 0], **sampling})
    nodes["prompts"] = node("WanCorePromptsOverTime", clip=["encoder", 0], prompts=prompts, whole_video=whole)
    return nodes


def test_the_video_is_that_of_the_command_line_and_the_plan_shows_the_prompts(comfy: ComfyUI) -> None:
    asked = graph()
    links = {name: asked["sampler"]["inputs"][name] for name in ("model", "positive", "latent")}
    asked |= {"plan": node("WanCorePlanPreview", **links)}
    asked |= {"table": node("PreviewAny", source=["plan", 1])}
    run = comfy.run(asked)
    assert run.ok, run.status
    assert "prompts from frames 0, 8 of 17" in run.outputs["table"]["text"][0]
    frames = read_video(comfy.output_file(run, "save")).astype(np.float32)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    requests = (
        Request(prompt="", prompts_at=SCENES, steps=3, seed=1, **SIZE),
        Request(prompt=RED, steps=3, seed=1, **SIZE),
    )  # type: ignore[arg-type]
    expected, plain = (pipe.generate(one).frames.astype(np.float32) for one in requests)
    near, far = (float(np.abs(frames - one).mean()) for one in (expected, plain))
    assert near < 6 and near < 0.7 * far, (near, far)  # of 255: H.264 takes some


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (f"8: {GREEN}\n0: {RED}", "the first begins at frame 0"),
        (f"{GREEN}", "the first at frame 0"),
        ("", "no prompts given"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(comfy: ComfyUI, prompts: str, message: str) -> None:
    with pytest.raises(Refused) as refused:
        comfy.run(graph(prompts))
    assert message in str(refused.value.errors)
