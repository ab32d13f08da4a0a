"""Setups of the benchmark by their spelling, and a sparse one on a model that is measured again without."""

from __future__ import annotations

import pytest
import torch

from benchmarks.setups import find_setup
from wan_core.checkpoint import load_dit
from wan_core.config import OptionError
from wan_core.pipeline.sources import TINY


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp8/sdpa", ("fp8", "sdpa", "triton", "off", 1.0)),
        ("plain/math/torch/25%", ("plain", "math", "torch", "off", 0.25)),
        ("fp8/flash4/compile/12.5%", ("fp8", "flash4", "triton", "blocks", 0.125)),
    ],
)
def test_spellings(name: str, expected: tuple[object, ...]) -> None:
    setup = find_setup(name)
    assert (setup.precision, setup.attention, setup.kernels, setup.compile, setup.keep) == expected


@pytest.mark.parametrize("name", ["fp9", "fp8/", "fp8/sdpa/fast", "fp8/sdpa/25%/50%", "fp8/sdpa/25 %", "fp8/sdpa/0%"])
def test_what_is_no_setup_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=r"setup|keep"):
        find_setup(name)


def test_one_after_another_leaves_nothing_of_the_one_before() -> None:
    model = load_dit(TINY / "t2v_high.safetensors", dtype=torch.float32)
    text = model.prepare_text(torch.randn(1, 4, model.config.text_dim))
    x, time = torch.randn(1, 16, 3, 10, 14), torch.tensor([900.0])

    def run(name: str) -> torch.Tensor:
        setup = find_setup(name)
        with torch.no_grad(), setup.running():
            return setup.apply(model)(x, time, text)

    dense, half, quarter = (run(f"plain/sdpa/torch{more}") for more in ("", "/50%", "/25%"))
    assert torch.equal(run("plain/sdpa/torch/50%"), half) and torch.equal(run("plain/sdpa/torch"), dense)
    assert len({float(output.sum()) for output in (dense, half, quarter)}) == 3
