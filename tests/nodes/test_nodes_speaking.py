"""WanCore Sound to Video in a running ComfyUI, with files of random weights: the shared workflow makes, clip by clip,
what the command line makes of the same sound, and its file has that sound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests import s2v_loop as loop
from tests.animate_references import draw_weights
from tests.comfyui import ComfyUI, Graph
from tests.nodes.comfy_files import write_parts
from tests.nodes.workflow_pages import api_form
from tests.pipeline.test_sound_clips import write_wav
from tools.embedded_graphs import node
from wan_core.config import LoadOptions, Request
from wan_core.media.sound import read_sound
from wan_core.media.video import load_image, read_video
from wan_core.models.audio.wav2vec2 import XLSR_LARGE
from wan_core.pipeline import clips, hearing, sources
from wan_core.pipeline.pipeline import Pipeline

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
# In the place of AudioEncoderEncode, whose encoder has one size only.
STATES = """
import torch
class States:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("AUDIO_ENCODER_OUTPUT",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"path": ("STRING",), "samples": ("INT", {"max": 10**9})}}
    def run(self, path, samples):
        return ({"encoded_audio_all_layers": list(torch.load(path)[:, None]), "audio_samples": samples},)
NODE_CLASS_MAPPINGS = {"States": States}
"""
PROMPTS = {"positive": "a red circle", "negative": "blue"}
SIZE = {"width": loop.SIDE, "height": loop.SIDE, "frames": loop.CLIP - 3}
PLAN = {"steps": 2, "guidance_high": 1.5, "guidance_low": 1.5, "shift": 5.0, "solver": "euler"}
FRAMES, SEEDS = 32, (1, 2, 3)  # two seconds, in three clips; the seeds of the workflow


PACKS = {"states": STATES}


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    save_file(draw_weights(loop.CONFIG), base / "models/diffusion_models/s2v.safetensors", {"num_heads": "2"})
    write_parts(base)
    Image.fromarray(loop.drawn_pictures(1, 5)[0]).save(base / "input/reference.png")
    write_wav(base / "input/speech.wav", FRAMES / 16)
    torch.save(loop.drawn_states()[:, :99].clone(), base / "states.pt")


def graph_of(comfy: ComfyUI) -> Graph:
    """The shared workflow, smaller, without its LoRA, with the frames written."""
    graph: dict[str, Any] = {}
    files = {"WanCoreModelLoader": {"high": "s2v.safetensors"}, "WanCoreVAELoader": {"vae": "vae.safetensors"}}
    files |= {"WanCoreTextEncoderLoader": {"text_encoder": "umt5.safetensors"}, "WanCoreTextEncode": PROMPTS}
    files |= {"LoadImage": {"image": "reference.png"}, "LoadAudio": {"audio": "speech.wav"}}
    settings = {**files, "WanCoreSoundToVideo": SIZE, "WanCoreSampler": PLAN}
    shared = api_form("wan22_s2v_picture_speaks")
    loader = next(key for key, one in shared.items() if one["class_type"] == "WanCoreModelLoader")
    for key, one in shared.items():
        kind, inputs = one["class_type"], one["inputs"] | settings.get(one["class_type"], {})
        if kind == "AudioEncoderEncode":
            kind, inputs = "States", {"path": str(comfy.base / "states.pt"), "samples": FRAMES * 1000}
        if kind == "WanCoreSampler":
            inputs["model"] = [loader, 0]
        if kind not in ("WanCoreLoRA", "AudioEncoderLoader"):
            graph[key] = node(kind, **inputs)
    [video] = [one for one in graph.values() if one["class_type"] == "CreateVideo"]
    graph["pictures"] = node("SaveImage", images=video["inputs"]["images"], filename_prefix="frame")
    return graph


def command_line(comfy: ComfyUI, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Frames of the same video, each clip with the seed of its sampler."""
    models, input_folder = comfy.base / "models", comfy.base / "input"
    monkeypatch.setattr(hearing, "encoded", lambda *_: loop.drawn_states()[:, :99])
    monkeypatch.setattr(sources, "recognise_speech", lambda *_: sources.random_part(XLSR_LARGE, 0))
    files = {"high": "diffusion_models/s2v", "text_encoder": "text_encoders/umt5", "vae": "vae/vae"}
    pipe = Pipeline.load(
        LoadOptions(device="cpu", **{name: str(models / f"{path}.safetensors") for name, path in files.items()})
    )
    sample = clips.sample

    def seeded(run: Any, *arguments: Any) -> torch.Tensor:
        *first, clip, kept, reached = arguments
        job = replace(run.job, request=replace(run.job.request, seed=SEEDS[clip]))
        return sample(replace(run, job=job), *first, 0, kept, reached)

    monkeypatch.setattr(clips, "sample", seeded)
    size = {"width": loop.SIDE, "height": loop.SIDE, "clip_frames": SIZE["frames"]}
    media = {"reference": str(input_folder / "reference.png"), "audio": str(input_folder / "speech.wav")}
    texts = {"prompt": PROMPTS["positive"], "negative_prompt": PROMPTS["negative"]}
    return pipe.generate(Request(**texts, **size, **media, **PLAN)).frames


def test_the_shared_workflow_makes_the_video_of_the_command_line(
    comfy: ComfyUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(comfy)
    run = comfy.run(graph)
    assert run.ok, run.status
    frames = np.stack([load_image(path) for path in comfy.output_files(run, "pictures")]) * 255
    assert len(frames) == FRAMES
    expected = command_line(comfy, monkeypatch).astype(np.float32)
    assert np.abs(frames - expected).max() <= 2 and np.abs(frames - expected).mean() < 0.5
    [saved] = [key for key, one in graph.items() if one["class_type"] == "SaveVideo"]
    file = comfy.output_file(run, saved)
    assert len(read_video(file)) == FRAMES
    assert abs(read_sound(file).seconds - FRAMES / 16) <= 1 / 16
