"""The report card in a running ComfyUI: of text and of an image, and again after it was broken off."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.comfyui import ComfyUI, Graph, Refused
from tools.embedded_graphs import TINY, TINY_I2V, loaders, node

pytestmark = pytest.mark.comfy


def card(expert: str = TINY, **changed: Any) -> Graph:
    inputs = {"width": 48, "height": 48, "frames": 5, "steps": 10, "seed": 3, "with_prompts": False}
    links = {"model": ["model", 0], "clip": ["encoder", 0], "vae": ["vae", 0]}
    prompts = "a red circle moving right on a blue background"
    graph = loaders(expert, expert)
    del graph["text"]
    graph["card"] = node("WanCoreReportCard", **{**links, **inputs, "prompts": prompts, **changed})
    graph["words"] = node("PreviewAny", source=["card", 1])
    return graph


@pytest.mark.parametrize("expert", [TINY, TINY_I2V])
def test_a_card_of_text_and_of_an_image(comfy: ComfyUI, expert: str) -> None:
    run = comfy.run(card(expert))
    assert run.ok, run.status
    text = run.outputs["words"]["text"][0]
    task = "i2v-tiny" if expert == TINY_I2V else "t2v-tiny"
    assert f"{task}, 48x48, 5 frames, 10 steps" in text and "red circle" not in text
    assert re.findall(r"^\| (\w+) \| \d", text, re.MULTILINE) == ["full", "careful", "balanced", "fast"]
    assert len(run.outputs["card"]["images"]) == 1
    files = sorted(path.name for path in (comfy.base / "output" / "WanCore").iterdir())
    assert "report-card.md" in files and "report-card.png" in files and ".report-card" not in files


def test_what_does_not_fit_the_model_is_refused(comfy: ComfyUI) -> None:
    for changed, says in (
        ({"width": 48, "height": 0}, "set both"),
        ({"width": 40, "height": 48}, "size 40x48 given"),
        ({"width": 0, "height": 0, "frames": 6}, "6 frames given"),
        ({"width": 8192, "height": 8192, "frames": 4001}, "8192x8192 and 4001 frames take"),
    ):
        with pytest.raises(Refused) as refusal:  # before the prompt runs
            comfy.run(card(**changed))
        assert says in refusal.value.errors["card"]["errors"][0]["details"], refusal.value.errors
    number = {"width": ["side", 0], "height": 48}  # known when the node runs
    run = comfy.run({**card(**number), "side": node("PrimitiveInt", value=40)})
    assert not run.ok and "40x48" in run.message("execution_error")["exception_message"]


def test_a_card_that_was_interrupted_goes_on(comfy: ComfyUI) -> None:
    graph = card(seed=11)
    queued, folder = comfy.queue(graph), comfy.base / "output" / "WanCore" / ".report-card"
    deadline = time.monotonic() + 300
    while len(finished := sorted(folder.glob("*/*.npz"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    comfy.post("/interrupt", {})
    assert not comfy.wait(queued).ok and finished
    assert "finished videos are kept in" in comfy.log() and list(folder.glob("*/*.npz"))
    run = comfy.run(graph)
    assert run.ok and "finished videos are there" in comfy.log() and not folder.exists()
