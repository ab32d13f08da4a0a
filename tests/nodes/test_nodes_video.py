"""Decode to Video in a running ComfyUI: its own Save Video stores the file without encoding it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.comfyui import ComfyUI, Graph
from tests.nodes.comfy_files import FAULTS, assert_comes_true
from tools.embedded_graphs import SMALL, node, text_to_video
from wan_core.media.video import read_video

pytestmark = pytest.mark.comfy

# A VAE of another kind: it has what ComfyUI's own nodes call, and nothing else.
PLAIN = """
class Plain:
    def __init__(self, vae):
        self.decode = vae.decode
        self.decode_tiled = vae.decode_tiled

class PlainVAE:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("VAE",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"vae": ("VAE",)}}
    def run(self, vae):
        return (Plain(vae),)

NODE_CLASS_MAPPINGS = {"PlainVAE": PlainVAE}
"""


PACKS = {"faults": FAULTS, "plain": PLAIN}


def decoded_to_video(size: dict[str, int] | None = None, **inputs: Any) -> Graph:
    graph = text_to_video(size, steps=2)
    links = {"vae": ["vae", 0], "latent": ["sampler", 0], "report": ["sampler", 1]}
    graph["video"] = node(
        "WanCoreDecodeToVideo", **{**links, "fps": 8.0, "encoder": "as Save Video", "tiling": "auto", **inputs}
    )
    del graph["decode"]
    return graph


def packets(path: Path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


def temporary(comfy: ComfyUI) -> set[Path]:
    return set((comfy.base / "temp").glob("WanCore-*"))


def test_save_video_copies_what_was_encoded(comfy: ComfyUI) -> None:
    """x264 writes its settings into the first frame: those of preset veryfast, and Save Video's are others."""
    graph = decoded_to_video(encoder="fast")
    graph["sampler"]["inputs"]["steps"] = 0
    graph["report"] = node("WanCoreReport", report=["video", 1])
    for name, form in (("save", "auto"), ("mp4", "mp4")):
        graph[name] = node("SaveVideo", video=["video", 0], filename_prefix=name, format=form, codec="auto")
    run = comfy.run(graph)
    assert run.ok, run.status
    assert b"subme=2" in packets(comfy.output_file(run, "save"))[0]
    for name in ("save", "mp4"):
        assert packets(comfy.output_file(run, name)) == packets(comfy.output_file(run, "save"))
        with av.open(str(comfy.output_file(run, name))) as container:
            assert "WanCoreDecodeToVideo" in container.metadata["prompt"]
            assert container.streams.video[0].average_rate == 8
    assert_comes_true(comfy.output_file(run, "save"))


def test_the_frames_are_those_of_decode_and_save_video(comfy: ComfyUI) -> None:
    """Both ways from the same latents; the encoder has the same settings, so the files are about equally large."""
    graph = decoded_to_video()
    graph["decode"] = node("WanCoreVAEDecode", vae=["vae", 0], latent=["sampler", 0], tiling="auto")
    graph["other"] = node("CreateVideo", images=["decode", 0], fps=8)
    graph["save other"] = node("SaveVideo", video=["other", 0], filename_prefix="other", format="auto", codec="auto")
    run = comfy.run(graph)
    assert run.ok, run.status
    ours, other = (comfy.output_file(run, name) for name in ("save", "save other"))
    difference = np.abs(read_video(ours).astype(int) - read_video(other))
    assert difference.mean() < 3  # ComfyUI 0.8 writes other colours and does not say which
    assert 0.7 < sum(map(len, packets(ours))) / sum(map(len, packets(other))) < 1.4


def test_sound_and_other_encoders(comfy: ComfyUI) -> None:
    graph = decoded_to_video(SMALL, audio=["sound", 0])
    graph["sound"] = node("EmptyAudio", duration=2.0, sample_rate=44100, channels=2)
    for name, encoder in (("frames", "all cores"), ("fast", "fast")):
        inputs = {**graph["video"]["inputs"], "encoder": encoder}
        graph[name] = node("WanCoreDecodeToVideo", **inputs)
        graph[f"save {name}"] = node("SaveVideo", video=[name, 0], filename_prefix=name, format="auto", codec="auto")
    run = comfy.run(graph)
    assert run.ok, run.status
    for name in ("save", "save frames", "save fast"):
        path = comfy.output_file(run, name)
        assert len(read_video(path)) == 5
        with av.open(str(path)) as container:
            assert [stream.type for stream in container.streams] == ["video", "audio"]
            assert container.streams.audio[0].duration * container.streams.audio[0].time_base < 0.7


def test_out_of_memory_goes_on_in_tiles_or_leaves_no_file(comfy: ComfyUI) -> None:
    graph = decoded_to_video(SMALL, vae=["short", 0])
    graph["short"] = node("ShortOfMemory", vae=["vae", 0], always=True)
    run = comfy.run(graph)
    assert not run.ok and not temporary(comfy)
    graph["short"]["inputs"]["always"] = False
    run = comfy.run(graph)
    assert run.ok and len(read_video(comfy.output_file(run, "save"))) == 5


def test_comfyui_s_own_vae(comfy: ComfyUI) -> None:
    """Known by its methods alone: ComfyUI's VAELoader reads no architecture as small as the embedded one."""
    graph = decoded_to_video(SMALL, vae=["plain", 0])
    graph["plain"] = node("PlainVAE", vae=["vae", 0])
    run = comfy.run(graph)
    assert run.ok, run.status
    assert len(read_video(comfy.output_file(run, "save"))) == 5
