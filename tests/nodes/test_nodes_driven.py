"""WanCore Animate and WanCore Animate 2 in a running ComfyUI, with files of random weights: a clip is what the command
line makes of the same media, and goes on from frames that were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.animate_references import draw_weights
from tests.comfyui import ComfyUI, Graph
from tests.nodes.comfy_files import write_parts
from tests.nodes.test_nodes_wan21 import write_vision
from tests.nodes.unrolled_loop import of_kind, unrolled
from tests.nodes.workflow_pages import api_form
from tests.pipeline.test_clips import CONFIGS, HEIGHT, WIDTH, drawn
from tools.embedded_graphs import node
from wan_core.config import LoadOptions, Request
from wan_core.media.mp4 import write_mp4
from wan_core.models.wan.families import FAMILIES
from wan_core.pipeline.pipeline import Pipeline

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
KINDS = {"animate": "WanCoreAnimate", "animate2": "WanCoreAnimate2"}
WORKFLOWS = {"animate": "wan22_animate_14b", "animate2": "wan22_animate_2_moves"}
PROMPTS = {"positive": "a red circle", "negative": "blue"}
SIZE = {"width": WIDTH, "height": HEIGHT, "frames": 9}
PLAN = {"steps": 2, "seed": 3, "guidance_high": 1.5, "guidance_low": 1.5, "shift": 5.0, "solver": "euler"}


def smooth(height: int, width: int) -> np.ndarray:
    """A picture that resizing changes little."""
    few = Image.fromarray(drawn(1, 3, 4, 0)[0])
    return np.asarray(few.resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    for family, config in CONFIGS.items():
        metadata = {"num_heads": "2", **FAMILIES[family].metadata}
        save_file(draw_weights(config), base / "models" / "diffusion_models" / f"{family}.safetensors", metadata)
    write_parts(base)
    write_vision(base / "models" / "clip_vision" / "clip_vision_h.safetensors")
    Image.fromarray(smooth(HEIGHT, WIDTH)).save(base / "input" / "reference.png")
    poses = np.stack([np.roll(smooth(HEIGHT, WIDTH), 2 * n, axis=1) for n in range(9)])
    write_mp4(base / "input" / "pose.mp4", poses, fps=24)


def graph_of(family: str, **more: Any) -> Graph:
    """The shared workflow, smaller, without its LoRA and its face, with the latents kept and the frames written."""
    graph, named = smaller(WORKFLOWS[family], family)
    kind = KINDS[family]
    graph[named[kind]]["inputs"] |= {**SIZE, **more}
    if "face_video" in graph[named[kind]]["inputs"]:
        face = graph[named[kind]]["inputs"].pop("face_video")[0]
        del graph[graph[face]["inputs"]["video"][0]], graph[face]
    graph["kept"] = node("SaveLatent", samples=[named["WanCoreSampler"], 0], filename_prefix="kept")
    graph["pictures"] = node("SaveImage", images=[named["WanCoreVAEDecode"], 0], filename_prefix="frame")
    return graph


def smaller(workflow: str, family: str) -> tuple[Graph, dict[str, str]]:
    """A shared workflow with small files and without its LoRA; and the first node of each kind."""
    graph, named = api_form(workflow), dict[str, str]()
    for key, one in graph.items():
        named.setdefault(one["class_type"], key)
    graph[named["WanCoreModelLoader"]]["inputs"]["high"] = f"{family}.safetensors"
    graph[named["WanCoreTextEncoderLoader"]]["inputs"]["text_encoder"] = "umt5.safetensors"
    graph[named["WanCoreVAELoader"]]["inputs"]["vae"] = "vae.safetensors"
    graph[named["LoadImage"]]["inputs"]["image"] = "reference.png"
    graph[named["LoadVideo"]]["inputs"]["file"] = "pose.mp4"
    graph[named["WanCoreTextEncode"]]["inputs"] |= PROMPTS
    graph[named["WanCoreSampler"]]["inputs"] |= {**PLAN, "model": [named["WanCoreModelLoader"], 0]}
    del graph[named["WanCoreLoRA"]]
    return graph, named


def looped(frames: int) -> Graph:
    """The shared workflow with a loop, of clips of so many frames; the video's frames are written."""
    graph, named = smaller("wan22_animate_2_loop", "animate2")
    graph[named["WanCoreAnimate2"]]["inputs"] |= {"width": WIDTH, "height": HEIGHT}
    graph[named["PrimitiveInt"]]["inputs"]["value"] = frames
    video = graph[named["CreateVideo"]]["inputs"]["images"]
    graph["pictures"] = node("SaveImage", images=video, filename_prefix="looped")
    return graph


def frames_of(comfy: ComfyUI, graph: Graph) -> np.ndarray:
    run = comfy.run(graph)
    assert run.ok, run.status
    return np.stack([np.asarray(Image.open(path)) for path in comfy.output_files(run, "pictures")])


def latents_of(comfy: ComfyUI, graph: Graph) -> tuple[torch.Tensor, int]:
    """The latents, and how many frames were decoded of them."""
    run = comfy.run(graph)
    assert run.ok, run.status
    return load_file(comfy.output_file(run, "kept"))["latent_tensor"], len(run.outputs["pictures"]["images"])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_clip_is_the_command_lines(comfy: ComfyUI, family: str) -> None:
    """Its picture needs no fitting. CLIP's features differ a little: ComfyUI resizes for it with antialiasing."""
    graph = graph_of(family)
    if family == "animate2":
        video, vision = (of_kind(graph, kind) for kind in ("GetVideoComponents", "CLIPVisionLoader"))
        graph["first"] = node("ImageFromBatch", image=[video, 0], batch_index=0, length=1)
        graph["seen"] = node("CLIPVisionEncode", clip_vision=[vision, 0], image=["first", 0], crop="none")
        graph[of_kind(graph, KINDS[family])]["inputs"]["clip_vision_output_pose"] = ["seen", 0]
    latents, frames = latents_of(comfy, graph)
    assert latents.shape == (1, 16, 4, HEIGHT // 8, WIDTH // 8) and frames == 9
    models = comfy.base / "models"
    files = {"text_encoder": "text_encoders/umt5", "vae": "vae/vae", "clip_vision": "clip_vision/clip_vision_h"}
    files["high"] = f"diffusion_models/{family}"
    options = {name: str(models / f"{path}.safetensors") for name, path in files.items()}
    media = {"reference": str(comfy.base / "input/reference.png"), "pose_video": str(comfy.base / "input/pose.mp4")}
    settings = {"prompt": PROMPTS["positive"], "negative_prompt": PROMPTS["negative"], "clip_frames": 9, **SIZE, **PLAN}
    expected = Pipeline.load(LoadOptions(device="cpu", **options)).generate(Request(**media, **settings)).latents
    assert float((expected[:, :, :4] - latents).norm() / latents.norm()) < 0.05


@pytest.mark.parametrize("family", CONFIGS)
def test_a_clip_goes_on_from_frames_that_were_made(comfy: ComfyUI, family: str) -> None:
    first, _ = latents_of(comfy, graph_of(family))
    graph, again = graph_of(family), graph_of(family)
    decode = of_kind(graph, "WanCoreVAEDecode")
    for key in (of_kind(again, kind) for kind in (KINDS[family], "WanCoreSampler", "TrimVideoLatent")):
        graph[f"second-{key}"] = again[key]
    own = {name for name in graph if name.startswith("second-")}
    for key in own:
        links = graph[key]["inputs"]
        links |= {
            n: [f"second-{v[0]}", v[1]] for n, v in links.items() if isinstance(v, list) and f"second-{v[0]}" in own
        }
    driven = f"second-{of_kind(again, KINDS[family])}"
    graph[driven]["inputs"]["previous_frames"] = [decode, 0]
    graph["count"] = node("PreviewAny", source=[driven, 4])
    graph["kept"]["inputs"]["samples"] = [f"second-{of_kind(again, 'WanCoreSampler')}", 0]
    second, _ = latents_of(comfy, graph)
    assert second.shape == first.shape and not torch.allclose(second, first, atol=1e-2)


@pytest.mark.parametrize(
    ("family", "changed"),
    [("animate2", {"pose_strength": 0.0}), ("animate2", {"reference_strength": 0.0})],
)
def test_strengths_reach_the_model(comfy: ComfyUI, family: str, changed: Any) -> None:
    assert not torch.equal(latents_of(comfy, graph_of(family, **changed))[0], latents_of(comfy, graph_of(family))[0])


@pytest.mark.parametrize(("clip", "passes"), [(5, 2), (9, 1)])
def test_a_video_in_a_loop_unrolled(comfy: ComfyUI, clip: int, passes: int) -> None:
    """The graph that ComfyUI 0.36 and newer expand a loop to, for those without loops. There are
    9 frames: each clip but the first has 4 new."""
    whole = {"0": node("EmptyImage", width=WIDTH, height=HEIGHT, batch_size=1, color=0)}
    frames = frames_of(comfy, {**unrolled(looped(clip), passes, ["0", 0]), **whole})
    assert frames.shape == (9, HEIGHT, WIDTH, 3)
    if passes > 1:
        assert not (frames[4] == frames[5]).all(), "the frame that both clips have is there once"


def test_a_video_in_a_loop(comfy: ComfyUI) -> None:
    if "StartLoop" not in comfy.get("/object_info"):
        pytest.skip("needs ComfyUI 0.36 or newer: Start Loop and End Loop")
    assert frames_of(comfy, looped(5)).shape == (9, HEIGHT, WIDTH, 3)
