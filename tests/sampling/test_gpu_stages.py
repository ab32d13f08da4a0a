"""The resolution schedule on a GPU: what a CPU makes, with sparse attention and a cache, and graphs for each size."""

from __future__ import annotations

import pytest
import torch

from wan_core.config import LoadOptions, Request
from wan_core.execution.graphs import Captured, GraphedBlocks
from wan_core.models.wan.runners import BlockInputs, Run
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import parse_setting

pytestmark = pytest.mark.gpu
CAPTION = "a red circle moving right on a blue background"


def latents(device: str, setting: str, **options) -> torch.Tensor:
    pipe = Pipeline.load(LoadOptions(model="tiny", device=device, precision="fp32", **options))
    run = pipe.prepare(Request(prompt=CAPTION, steps=12, seed=3, skip=parse_setting(setting)))
    return pipe.sample(run, pipe.encode(run)).cpu()


@pytest.mark.parametrize("more", ["", "+sparse:0.5/0/0:math", "+taylorseer:2/1/0.2"])
def test_a_gpu_makes_what_a_cpu_makes(more: str) -> None:
    setting = f"stages:0.5/0.9-0.99:every2{more}"
    actual, wanted = latents("cuda", setting), latents("cpu", setting)
    assert float((actual - wanted).norm() / wanted.norm()) < 2e-2  # rounding of the first steps grows over the others


def test_graphs_of_two_sizes_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The high expert runs at full size, twice small, at full size and small again: the last three from graphs."""
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cuda"))
    run = pipe.prepare(Request(prompt=CAPTION, steps=12, seed=3, skip=parse_setting("stages:0.5/0.9-0.99:every3")))
    captured, capture = [], GraphedBlocks.capture

    def noted(graphs: GraphedBlocks, inputs: BlockInputs, inner: Run) -> Captured:
        captured.append(inputs.tokens.shape[1])
        return capture(graphs, inputs, inner)

    monkeypatch.setattr(GraphedBlocks, "capture", noted)
    video_latents = pipe.sample(run, pipe.encode(run))
    assert {*captured} == {5 * 6 * 6, 5 * 3 * 3}
    for expert in ("high", "low"):
        pipe.models.expert(expert).runners.remove(GraphedBlocks)
    assert torch.equal(video_latents, pipe.sample(run, pipe.encode(run))) and bool(video_latents.isfinite().all())
