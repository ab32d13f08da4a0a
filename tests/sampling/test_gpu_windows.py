"""Context windows on a GPU: what a CPU makes, with sparse attention and a cache, and graphs for two sizes of window."""

from __future__ import annotations

import pytest
import torch

from wan_core.config import LoadOptions, Request, WindowOptions
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import parse_setting

pytestmark = pytest.mark.gpu


def request(windows: str, setting: str = "full") -> Request:
    return Request(
        prompt="a red circle moving right on a blue background",
        frames=33,
        steps=12,
        seed=3,
        skip=parse_setting(setting),
        windows=WindowOptions.parse(windows),
    )


def latents(pipe: Pipeline, asked: Request) -> torch.Tensor:
    run = pipe.prepare(asked)
    return pipe.sample(run, pipe.encode(run)).cpu()


@pytest.mark.parametrize(
    ("windows", "setting"),
    [
        ("17/8", "full"),
        ("17/8:looped_uniform:relative", "sparse:0.5/0/0:math"),
        ("17/8:standard_static:overlap-linear", "sparse:0.5/0/0:math:reuse2"),
        ("17/8:standard_static", "taylorseer:2/1/0.2"),
    ],
)
def test_a_gpu_makes_what_a_cpu_makes(windows: str, setting: str) -> None:
    both = [
        latents(Pipeline.load(LoadOptions(model="tiny", device=device, precision="fp32")), request(windows, setting))
        for device in ("cuda", "cpu")
    ]
    assert (
        float((both[0] - both[1]).norm() / both[1].norm()) < 2e-2
    )  # rounding of the first steps grows over the others
