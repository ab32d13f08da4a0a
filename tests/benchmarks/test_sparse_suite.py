"""What the suite `sparse` asks for: a first frame where a model needs one, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import sparse
from benchmarks.setups import find_setup
from wan_core.models.wan.families import find_task


@pytest.mark.parametrize(("task", "picture"), [("t2v-A14B", False), ("i2v-A14B", True), ("ti2v-5B", False)])
def test_a_first_frame_is_given_where_a_model_needs_one(task, picture, monkeypatch):
    asked = []

    def generate(request):
        asked.append(request)
        if request.steps == 3:
            raise KeyboardInterrupt

    pipe = SimpleNamespace(models=SimpleNamespace(task=find_task(task)), generate=generate)
    monkeypatch.setattr(sparse.Pipeline, "load", lambda options: pipe)
    trial = sparse.Trial(f"random:{task}", torch.device("cpu"), torch.float32, 1, None)
    with pytest.raises(KeyboardInterrupt):
        list(trial.videos("sparse:0.5/0.1:error", find_setup("plain torch"), "64x32x5", 3))
    warm, timed = asked
    assert warm.image == timed.image and (timed.image is not None) is picture
    assert (warm.steps, warm.skip.sparse.score, timed.skip.sparse.score) == (2, "error", "error")
