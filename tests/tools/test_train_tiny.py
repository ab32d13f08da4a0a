"""The training tool runs through all of its phases, and what it feeds the models is what the pipeline feeds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools.tiny.experts import T2V, adopt, initialise
from tools.tiny.vae import CONFIG
from tools.tiny.words import TEXT_LEN
from tools.train_tiny import main
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae, save
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.sources import TINY_LORAS

SMALL = ["--device", "cpu", "--size", "32", "--frames", "5"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps of every phase, through the real command."""
    folder = tmp_path_factory.mktemp("tiny")
    out = ["--out", str(folder), *SMALL]
    main(["vae", *out, "--steps", "2", "--batch", "2", "--bank", "4", "--checks", "2"])
    main(["t2v", *out, "--steps", "2", "--batch", "4", "--bank", "8"])
    main(["i2v", *out, "--steps", "2", "--batch", "4", "--bank", "8"])
    return folder


def test_every_part_loads_and_all_fit_in_twenty_megabytes(trained: Path):
    vae = load_vae(trained / "vae.safetensors")
    assert vae.config.latents_std != CONFIG.latents_std, "the statistics were not measured"
    text = load_text_encoder(trained / "text_encoder.safetensors", dtype=torch.float32)
    assert text.encode(["a red circle", ""]).shape == (2, 4, 64)
    for task, channels in (("t2v", 16), ("i2v", 36)):
        for expert in ("high", "low"):
            config = load_dit(trained / f"{task}_{expert}.safetensors").config
            assert (config.in_channels, config.text_dim, config.text_len) == (channels, 64, TEXT_LEN)
    loras = sum(path.stat().st_size for path in TINY_LORAS.values())
    assert loras + sum(path.stat().st_size for path in trained.glob("*.safetensors")) < 20e6
    assert all(path.stat().st_size < 20e6 for path in trained.iterdir())


def test_a_phase_goes_on_from_its_own_files(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = torch.load(trained / "resume_vae.pt", weights_only=True)["weights"]
    one_step = ["--seed", "5", "--steps", "1", "--batch", "1", "--bank", "2", "--checks", "1"]
    main(["vae", "--init", str(trained), "--out", str(tmp_path), *SMALL, *one_step])
    after = torch.load(tmp_path / "resume_vae.pt", weights_only=True)["weights"]
    assert "going on from" in capsys.readouterr().out
    change = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < change < 1e-3, "one step of a warm-up changes weights, but hardly"


def test_experts_go_on_from_finished_ones_with_more_blocks(trained: Path, tmp_path: Path):
    """Two blocks more, which change nothing at first, and a text encoder that is trained no more."""
    few = WanModel(replace(T2V, num_layers=3)).requires_grad_(False)
    initialise(few)
    torch.nn.init.normal_(few.head.head.weight, std=0.1)
    save(few, tmp_path / "few.safetensors")
    more = WanModel(T2V).requires_grad_(False)
    initialise(more)
    adopt(more, tmp_path / "few.safetensors")
    inputs = torch.randn(2, 16, 2, 4, 4), torch.tensor([300.0, 900.0]), torch.randn(2, 5, 64)
    assert torch.equal(more(*inputs), few(*inputs)) and len(more.blocks) == 8
    (trained / "resume_text.pt").rename(tmp_path / "resume_text.pt")
    before = (trained / "text_encoder.safetensors").read_bytes()
    out = ["--out", str(tmp_path), "--init", str(trained), "--device", "cpu", "--frames", "5", "--steps", "2"]
    main(["t2v", *out, "--size", "32", "48x32", "--batch", "4", "--bank", "4"])
    assert (trained / "text_encoder.safetensors").read_bytes() == before
    assert not (tmp_path / "text_encoder.safetensors").exists()
    assert (tmp_path / "t2v_low.safetensors").is_file()
