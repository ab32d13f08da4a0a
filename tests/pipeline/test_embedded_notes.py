"""Warnings where the embedded model is asked for what it never saw."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from wan_core.execution.report import Phase, Report, draw_report
from wan_core.models.wan.families import find_task
from wan_core.pipeline.check import never_seen
from wan_core.workers.client import add_report
from wan_core.workers.wire import pack, unpack
from wan_lab.shapes import SCENES

CAPTION = "a red circle moving right on a blue background"


def notes(prompt: str = CAPTION, task: str = "t2v-tiny", size: tuple[int, int] = (96, 96), frames: int = 17):
    fields = {
        "request": SimpleNamespace(prompts_at=()),
        "texts": (SimpleNamespace(text=prompt),),
        "clips": (SimpleNamespace(frames=frames),),
    }
    job = SimpleNamespace(task=find_task(task), width=size[0], height=size[1], **fields)
    return never_seen(job)  # pyright: ignore[reportArgumentType]


def test_every_caption_is_known_and_other_models_know_everything() -> None:
    assert not any(notes(scene.caption) for scene in SCENES)
    assert not notes("a cat", task="t2v-A14B", size=(1280, 720), frames=81)
    assert not notes("", task="animate2-tiny")  # the driving video says what moves


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "a cat"}, "captions such as"),
        ({"prompt": ""}, "captions such as"),
        ({"size": (256, 96)}, "256x96"),
        ({"size": (96, 32)}, "96x32"),
        ({"frames": 33}, "33 are asked for"),
    ],
)
def test_what_it_never_saw(fields: dict, said: str) -> None:
    (note,) = notes(**fields)
    assert said in note


def test_warnings_are_the_first_lines_of_a_report_and_in_its_picture() -> None:
    report = Report(torch.device("cpu"), {"seed": 1}, {"text": Phase(1.0)}, ["guidance: batched"])
    plain = draw_report(report)
    report.warn("the experts are swapped")
    lines = report.text().splitlines()
    assert lines[1] == "  warning: the experts are swapped" and lines[-1] == "  note: guidance: batched"
    assert "the experts are swapped" in report.as_dict()["notes"]
    assert draw_report(report).height > plain.height
    sent = unpack(Report, json.loads(json.dumps(pack(report, {}, ""))))
    other = Report(torch.device("cpu"))
    add_report(other, sent)
    assert other.warning_lines() == sent.warning_lines() == report.warning_lines()
