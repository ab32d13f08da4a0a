"""Weights that are read while other nodes run, in a running ComfyUI: the same video, and nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.comfyui import ComfyUI, Graph, make_base, serving
from tools.embedded_graphs import SMALL, node, text_to_video

pytestmark = pytest.mark.comfy

# A CPU reads ahead too, slowly where SLOW is there, and fails where BROKEN is there; `Held` itself is not changed.
AHEAD_ON_CPU = """
import sys, time
from pathlib import Path
FOLDER = Path({folder!r})

def patch():
    ahead = next(m for n, m in list(sys.modules.items()) if n.endswith(".nodes.host.ahead"))
    memory = next(m for n, m in list(sys.modules.items()) if n.endswith(".nodes.host.memory"))
    ahead.AHEAD_ON, ahead.RESERVE = ("cuda", "cpu"), 0
    read = memory._read_ahead
    def changed(part, loras, device, finish, on_bytes):
        if (FOLDER / "BROKEN").exists():
            raise OSError("the disk is gone, says the test")
        for _ in range(100 if (FOLDER / "SLOW").exists() else 0):
            on_bytes(1)
            time.sleep(0.05)
        return read(part, loras, device, finish, on_bytes)
    memory._read_ahead = changed

class Patch:
    CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "test", "run", (), True
    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{}}}}
    def run(self):
        patch()
        return ()

NODE_CLASS_MAPPINGS = {{"PatchAhead": Patch}}
"""


@pytest.fixture(scope="module")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    folder = tmp_path_factory.mktemp("comfyui")
    yield from serving(make_base(folder, {"ahead": AHEAD_ON_CPU.format(folder=str(folder))}))


@pytest.fixture
def expected(comfy: ComfyUI) -> dict[str, np.ndarray]:
    """The videos without reading ahead."""
    return {"plain": video(comfy, graph()), "lora": video(comfy, with_lora())}


def video(comfy: ComfyUI, graph: Graph) -> np.ndarray:
    """Its frames as pictures: ComfyUI 0.8's encoder does not give the same bytes for the same frames."""
    graph = {**graph, "pictures": node("SaveImage", images=["decode", 0], filename_prefix="frame")}
    run = comfy.run(graph)
    assert run.ok, run.status
    files = [comfy.output_file(run, "pictures", index) for index in range(SMALL["frames"])]
    return np.stack([np.asarray(Image.open(file)) for file in files])


def graph() -> Graph:
    return text_to_video(SMALL, steps=2)


def with_lora() -> Graph:
    """Both experts are read again with it, if they were being read without."""
    changed = graph()
    names = {"high": "tiny 4-step high (embedded)", "low": "tiny 4-step low (embedded)"}
    changed["lora"] = node("WanCoreLoRA", model=["model", 0], **names, strength_high=1.0, strength_low=1.0)
    changed["sampler"]["inputs"]["model"] = ["lora", 0]
    return changed


def freed(comfy: ComfyUI) -> None:
    """Nodes run again, and weights are read again."""
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(1.5)  # the worker looks once a second


def said(comfy: ComfyUI, since: int) -> str:
    return comfy.log()[since:]


def flag(comfy: ComfyUI, name: str) -> Path:
    return comfy.base / name


def test_reading_ahead(comfy: ComfyUI, expected: dict[str, np.ndarray]) -> None:
    assert not np.array_equal(expected["plain"], expected["lora"])
    assert " ahead" not in comfy.log()
    assert comfy.run({"patch": node("PatchAhead")}).ok

    # The same video, and each model read once.
    freed(comfy)
    since = len(comfy.log())
    assert np.array_equal(video(comfy, graph()), expected["plain"])
    log = said(comfy, since)
    assert log.count("reads the high-noise expert") == log.count("reads the VAE") == 1
    assert "WanCore loaded" not in log and "could not" not in log
    assert log.index("reads the low-noise expert") < log.index("WanCore encoded the text")  # loaders run first
    freed(comfy)
    assert np.array_equal(video(comfy, with_lora()), expected["lora"])

    # What fails there is done again where it is needed.
    flag(comfy, "BROKEN").touch()
    freed(comfy)
    since = len(comfy.log())
    assert np.array_equal(video(comfy, graph()), expected["plain"])
    log = said(comfy, since)
    assert "could not read the high-noise expert ahead: the disk is gone" in log
    assert log.count("WanCore loaded the high-noise expert") == 1
    flag(comfy, "BROKEN").unlink()

    # Interrupted while a node waits for it: what was begun ends, and the next run works.
    flag(comfy, "SLOW").touch()
    freed(comfy)
    since = len(comfy.log())
    prompt = comfy.queue(graph())
    deadline = time.monotonic() + 30
    while "reads the low-noise expert" not in said(comfy, since) and time.monotonic() < deadline:
        time.sleep(0.05)
    comfy.post("/interrupt", {})
    assert comfy.wait(prompt).status["status_str"] == "error"
    flag(comfy, "SLOW").unlink()
    freed(comfy)
    assert "stopped reading" in said(comfy, since)
    assert np.array_equal(video(comfy, graph()), expected["plain"])
