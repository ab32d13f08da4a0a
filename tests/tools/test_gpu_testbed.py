"""The test bed trains on a GPU: every step is a CUDA graph, one for each size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.testbed.__main__ import main
from wan_core.checkpoint import load_dit, load_vae

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [[], ["--compile"]])
def test_it_trains_and_goes_on(tmp_path: Path, compiled: list[str]):
    train = ["train", "--out", str(tmp_path), "--size", "192x128", "--frames", "9", "--layers", "2", *compiled]
    main([*train, "--steps", "8"])
    first = load_dit(tmp_path / "high_noise_model.safetensors").head.head.weight
    vae = load_vae(tmp_path / "vae.safetensors").conv2.weight
    main([*train, "--steps", "8", "--seed", "1"])
    again = load_dit(tmp_path / "high_noise_model.safetensors").head.head.weight
    assert first.isfinite().all() and again.isfinite().all() and not torch.equal(first, again)
    assert torch.equal(vae, load_vae(tmp_path / "vae.safetensors").conv2.weight)
