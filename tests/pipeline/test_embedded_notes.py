"""Warnings where the embedded model is asked for what it never saw."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from wan_core.config import LoadOptions, Request, WindowOptions
from wan_core.media.shapes import SCENES
from wan_core.models.wan.tasks import find_task
from wan_core.pipeline.embedded import never_seen
from wan_core.pipeline.pipeline import Pipeline

CAPTION = "a red circle moving right on a blue background"


def notes(
    prompt: str = CAPTION, task: str = "t2v-tiny", size: tuple[int, int] = (96, 96), frames: int = 17, windows=None
):
    given = {
        "plan": SimpleNamespace(context_windows=windows),
        "request": SimpleNamespace(prompt=prompt),
        "clips": (SimpleNamespace(frames=frames),),
    }
    job = SimpleNamespace(task=find_task(task), width=size[0], height=size[1], **given)
    return never_seen(job)  # pyright: ignore[reportArgumentType]


def test_every_caption_is_known_and_other_models_know_everything() -> None:
    assert not any(notes(scene.caption) for scene in SCENES)
    assert not notes("a cat", task="t2v-A14B", size=(1280, 720), frames=81)
    assert not notes("", task="animate2-tiny")  # the driving video says what moves
    assert not notes(frames=33, windows=WindowOptions.parse("17"))  # a forward sees no more


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": "a cat"}, "captions such as"),
        ({"prompt": ""}, "captions such as"),
        ({"size": (256, 96)}, "256x96"),
        ({"size": (96, 32)}, "96x32"),
        ({"frames": 33}, "33 are asked for"),
    ],
)
def test_what_it_never_saw(given: dict, said: str) -> None:
    (note,) = notes(**given)
    assert said in note


def test_it_is_said_before_the_run_and_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    tiny = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    tiny.prepare(Request(prompt="a cat on a sofa"))
    assert any("captions such as" in note for note in tiny.report.notes) and "captions such as" in caplog.text
