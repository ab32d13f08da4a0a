"""In a running ComfyUI: texts with ranges, and what a node says or refuses because it would have no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.comfyui import ComfyUI, Graph, Refused, Run
from tools.embedded_graphs import CAPTION, TINY_I2V, image_to_video, node, small

pytestmark = pytest.mark.comfy

OTHER = "a green star moving up on a white background"
HIGH = "high_noise.safetensors"


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    folder = base / "models" / "diffusion_models"
    tiny = base / "custom_nodes" / "wancore" / "wan_core" / "assets" / "tiny"
    for expert in ("high", "low"):  # links, as users have them
        (folder / f"{expert}_noise.safetensors").symlink_to(tiny / f"t2v_{expert}.safetensors")
    for other in ("vae", "text_encoders", "clip_vision"):  # in a folder where it does not belong
        (base / "models" / other / HIGH).symlink_to(tiny / "t2v_high.safetensors")
    Image.fromarray(np.full((48, 48, 3), 90, np.uint8)).save(base / "input" / "first.png")


def texts(*ranges: tuple[float, float], **sampling: Any) -> Graph:
    """Two prompts, each for a range of the run, combined; nothing is guided."""
    nodes = small(**{"steps": 4, "guidance_high": 1.0, "guidance_low": 1.0, "solver": "euler", **sampling})
    for n, (start, end) in enumerate(ranges):
        nodes[f"text{n}"] = node("CLIPTextEncode", clip=["encoder", 0], text=(CAPTION, OTHER)[n])
        nodes[f"range{n}"] = node("ConditioningSetTimestepRange", conditioning=[f"text{n}", 0], start=start, end=end)
    nodes["sum"] = node("ConditioningCombine", conditioning_1=["range0", 0], conditioning_2=["range1", 0])
    nodes["sampler"]["inputs"]["positive"] = ["sum", 0]
    return nodes


def refused(run: Run, where: str = "sampler") -> str:
    error = run.message("execution_error")
    assert error["node_id"] == where
    return error["exception_message"]


def test_texts_for_ranges_of_the_run(comfy: ComfyUI) -> None:
    assert comfy.run(texts((0.0, 0.5), (0.5, 1.0))).ok
    assert comfy.run(texts((0.0, 0.7), (0.2, 1.0))).ok, "both count where they overlap"
    assert "has no text for step" in refused(comfy.run(texts((0.0, 0.1), (0.9, 1.0))))


def test_a_video_on_the_latent_input(comfy: ComfyUI) -> None:
    nodes = small()
    nodes["second"] = {
        **nodes["sampler"],
        "inputs": {**nodes["sampler"]["inputs"], "latent": ["sampler", 0], "seed": 5},
    }
    nodes["decode"]["inputs"]["latent"] = ["second", 0]
    assert "`latent` holds a video" in refused(comfy.run(nodes), "second")


def test_strengths_and_more_first_frames_than_frames(comfy: ComfyUI) -> None:
    nodes = small()
    nodes["weaker"] = node("ConditioningSetAreaStrength", conditioning=["text", 0], strength=0.5)
    nodes["sampler"]["inputs"]["positive"] = ["weaker", 0]
    assert "`positive` carries strength" in refused(comfy.run(nodes))
    nodes = image_to_video()
    nodes["model"]["inputs"] |= {"high": TINY_I2V, "low": TINY_I2V}
    nodes["many"] = node("RepeatImageBatch", image=["picture", 0], amount=18)
    nodes["size"]["inputs"]["first_image"] = ["many", 0]
    assert "18 known frames given for a video of 17" in refused(comfy.run(nodes), "size")


def test_positions_of_motion_frames_need_a_model_that_has_such_frames(comfy: ComfyUI) -> None:
    assert "is for S2V" in refused(comfy.run(small(motion_positions="comfyui")))


def test_swapped_experts_and_weights_are_said_on_the_node(comfy: ComfyUI) -> None:
    nodes = small()
    nodes["model"]["inputs"] |= {"high": "low_noise.safetensors", "low": "high_noise.safetensors"}
    nodes["text"]["inputs"]["positive"] = "a (red:1.4) circle"
    nodes["report"] = node("WanCoreReport", report=["sampler", 1])
    nodes["words"] = node("PreviewAny", source=["report", 1])
    run = comfy.run(nodes)
    assert run.ok, run.status
    assert "warning: the experts are swapped" in run.outputs["model"]["text"][0]
    assert "(red:1.4): it is read as text" in run.outputs["text"]["text"][0]
    report = run.outputs["words"]["text"][0]
    assert "the experts are swapped" in report and "(red:1.4): it is read as text" in report


KNOWN = {"positive": ["text", 0], "negative": ["text", 1], "vae": ["vae", 0], "pose_video": ["picture", 0]}
KNOWN |= {"width": 96, "height": 96, "reference_image": ["picture", 0]}


@pytest.mark.parametrize(
    ("kind", "inputs", "message"),
    [
        ("WanCoreVAELoader", {"vae": HIGH, "precision": "auto"}, "a Wan VAE is expected here"),
        ("WanCoreTextEncoderLoader", {"text_encoder": HIGH, "precision": "checkpoint"}, "is expected here"),
        ("WanCoreVisionLoader", {"clip_vision": HIGH}, "a CLIP vision encoder is expected here"),
        ("WanCoreModelLoader", {"residency": "shard"}, "connect a WanCore Launcher"),
        ("WanCoreSampler", {"start_step": 8, "end_step": 4}, "between which no step is"),
        ("WanCoreSampler", {"motion": "fast"}, "write share of noise/guidance"),
        ("WanCoreSampler", {"lora_strengths": "slow"}, "write NAME=0;1"),
        ("WanCoreAnimate", {**KNOWN, "overlap": 3}, "overlap 3 given"),
        ("WanCoreAnimate", {**KNOWN, "frames": 78}, "4n + 1"),
        ("WanCoreAnimate2", {**KNOWN, "frames": 82}, "4n + 1"),
    ],
)
def test_what_constants_show_to_be_wrong_is_refused_before_the_prompt_runs(
    comfy: ComfyUI, kind: str, inputs: dict[str, Any], message: str
) -> None:
    """By an exception, whose sentence ComfyUI's page shows at once."""
    nodes, wrong = small(), node(kind, **with_defaults(comfy, kind, inputs))
    nodes["picture"] = node("LoadImage", image="first.png")
    [key] = [key for key, one in nodes.items() if one["class_type"] == kind] or ["wrong"]
    nodes[key] = {**wrong, "inputs": nodes.get(key, {"inputs": {}})["inputs"] | wrong["inputs"]}
    if key == "wrong":  # ComfyUI runs the outputs that are right
        del nodes["save"]
        nodes["shown"] = node("PreviewAny", source=["wrong", 0])
    with pytest.raises(Refused) as refused:
        comfy.queue(nodes)
    [[error]] = [one["errors"] for one in refused.value.errors.values()]
    assert set(refused.value.errors) == {key} and message in error["details"]
    assert error["type"] in ("exception_during_validation", "exception_during_inner_validation")


def with_defaults(comfy: ComfyUI, kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The widgets of a node as the page sends them; a model where it takes one."""
    values: dict[str, Any] = {}
    inputs_of = comfy.get("/object_info")[kind]["input"]
    for group in (inputs_of.get(name, {}) for name in ("required", "optional")):
        values |= {name: options["default"] for name, (_, options) in group.items() if "default" in options}
        values |= {"model": ["model", 0]} if "model" in group and kind != "WanCoreModelLoader" else {}
    return values | inputs


def test_constants_for_sockets(comfy: ComfyUI) -> None:
    """ComfyUI hands any constant for a socket on; they are refused before the prompt runs."""
    for name, socket, takes in (
        ("model", "workers", "WANCORE_WORKERS"),
        ("vae", "workers", "WANCORE_WORKERS"),
        ("sampler", "skipping", "WANCORE_SKIPPING"),
        ("sampler", "positive", "CONDITIONING"),
        ("decode", "vae", "VAE"),
    ):
        nodes = small()
        nodes[name] = {**nodes[name], "inputs": nodes[name]["inputs"] | {socket: "abc"}}
        with pytest.raises(Refused) as refusal:
            comfy.run(nodes)
        [(where, one)] = refusal.value.errors.items()
        assert where == name and f"{socket} takes {takes}, and 'abc' was given" in one["errors"][0]["details"], one


@pytest.mark.parametrize("width", [24, 40])
def test_latents_that_patches_do_not_fill(comfy: ComfyUI, width: int) -> None:
    """ComfyUI's page rounds the width; over its API any is taken."""
    nodes = small()
    nodes["size"] = node("EmptyHunyuanLatentVideo", width=width, height=48, length=5, batch_size=1)
    assert "multiples of 1 x 2 x 2" in refused(comfy.run(nodes))
