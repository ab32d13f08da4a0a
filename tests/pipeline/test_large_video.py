"""What is said of videos far larger than models were trained on, and refused where not one tensor fits."""

from __future__ import annotations

import pytest
import torch

from wan_core.config import LoadOptions, OptionError, Request
from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.models.wan.families import TASKS, find_task
from wan_core.pipeline import check, run
from wan_core.pipeline.check import check_activation, memory_of, size_notes
from wan_core.pipeline.pipeline import Pipeline

CPU = torch.device("cpu")
CAPTION = "a red circle moving right on a blue background"


def test_no_model_is_warned_at_the_size_of_any_task_and_all_are_far_above() -> None:
    for task in TASKS.values():
        assert size_notes(task, task.vae, task.width, task.height) == []
        expected = task.release != "embedded"
        assert bool(size_notes(task, task.vae, 4096, 4096)) == expected
    assert "18.2 times the pixels of 1280x720" in size_notes(None, VAE_21, 4096, 4096)[0]
    assert size_notes(None, VAE_22, 1280, 1280) == [] and size_notes(None, VAE_22, 1920, 1088)
    assert size_notes(find_task("t2v-1.3B"), VAE_21, 1280, 720) == []  # it also makes what larger ones make


def test_a_tensor_that_exceeds_all_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    room = memory_of(CPU)
    assert room is None or room > 2**28
    monkeypatch.setattr(check, "total_bytes", lambda: 1000)
    check_activation((10, 25), 4, CPU)
    with pytest.raises(OptionError, match=r"an activation of this video \(10 x 26\) alone would take .*smaller size"):
        check_activation((10, 26), 4, CPU)
    monkeypatch.setattr(check, "total_bytes", lambda: None)
    check_activation((2**40,), 4, CPU)


def test_the_command_line_refuses_before_it_draws_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    request = Request(prompt=CAPTION, width=1024, height=1024, frames=17)
    tiny.prepare(request)
    monkeypatch.setattr(check, "total_bytes", lambda: 2**22)
    with pytest.raises(OptionError, match="an activation of this video"):
        tiny.prepare(request)
    monkeypatch.setattr(run, "available_bytes", lambda swap: 2**26)
    with pytest.raises(
        OptionError, match=r"1 x 16 x 5 x 128 x 128 on a CPU takes 0\.\d+ GiB .* 0\.0625 GiB are available"
    ):
        tiny.prepare(request)
