"""The training tool runs through all of its phases, and what it feeds the models is what the pipeline feeds them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tools.tiny.clips import HELD_OUT, TRAINED, Drawing, Ring, Size, image_rows, outline_rows
from tools.tiny.experts import ROUND, T2V, adopt, caption_rows, draw_sigmas, initialise, outline_weights
from tools.tiny.loop import Clock, Trainer
from tools.tiny.vae import CONFIG
from tools.tiny.words import DROPPED_ROWS, TEXT_LEN, token_table, train_tokenizer
from tools.train_tiny import main
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae, save
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.wan.inputs import image_channels
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.sources import TINY_LORAS
from wan_lab.shapes import SCENES, draw

SMALL = ["--device", "cpu", "--size", "32", "--frames", "5"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps of every phase, through the real command."""
    folder = tmp_path_factory.mktemp("tiny")
    out = ["--out", str(folder), *SMALL]
    main(["vae", *out, "--steps", "2", "--batch", "2", "--bank", "4", "--checks", "2"])
    main(["t2v", *out, "--steps", "2", "--batch", "4", "--bank", "8"])
    main(["i2v", *out, "--steps", "2", "--batch", "4", "--bank", "8"])
    main(["eval", *out, "--steps", "2", "--samples", "2", "--guidance", "3"])
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


def test_the_evaluation_reports_both_tasks(trained: Path):
    rows = json.loads(next(trained.glob("embedded-*.json")).read_text())["rows"]
    small = ", 32x32x5"
    names = ["text-to-video, guidance 3", "image-to-video, guidance 3"]
    assert [row["name"] for row in rows] == [name + small for name in names]
    assert all(0 <= row["all"] <= row["shape"] <= 1 for row in rows)
    assert (trained / "i2v_32x32_guidance3.png").read_bytes().startswith(b"\x89PNG")


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


def test_sizes_take_turns_and_have_about_as_many_tokens():
    assert sum(size == Size() for size in ROUND) == len(ROUND) // 2
    for size in ROUND:
        assert size.share_of(256) * size.width * size.height == pytest.approx(256 * 96 * 96, rel=0.05)
    turns: list[int] = []
    weight = torch.nn.Linear(1, 1)
    losses = [partial(take, turns, number, weight) for number in (0, 1, 0, 2)]
    trainer = Trainer({"one": weight}, losses, peak_lr=1e-3)
    trainer.run(Clock(1.0, 8))
    assert turns == [0, 1, 0, 2] * 2


def take(turns: list[int], number: int, module: torch.nn.Linear) -> dict[str, torch.Tensor]:
    turns.append(number)
    return {"one": module.weight.square().sum() + module.bias.square().sum()}


def test_outlines_are_where_colours_change():
    clips = draw(SCENES[:4], seed=0, frames=9, height=64, width=64)
    outline = outline_rows(clips)
    assert outline.shape == (4, 1, 3, 8, 8)
    changes = (clips.diff(dim=-1).abs().amax(1) > 0.1).float()  # [B, F, H, W - 1]
    cells = torch.nn.functional.max_pool2d(torch.nn.functional.pad(changes, (0, 1)), 8).bool()
    assert not (cells[:, 0] & ~outline[:, 0, 0]).any() and not (cells[:, 1:5].any(1) & ~outline[:, 0, 1]).any()
    assert 0.1 < outline.float().mean() < 0.7
    weight = outline_weights(outline, torch.tensor([0.0, 0.5, 0.9, 1.0]))
    assert torch.allclose(weight.mean((1, 2, 3, 4)), torch.ones(4))
    assert weight[3].unique().tolist() == [1.0]
    assert float(weight[0].max() / weight[0].min()) == pytest.approx(5)


def test_the_tokenizer_is_the_same_every_time_and_knows_every_word():
    proto = train_tokenizer()
    assert train_tokenizer() == proto
    tokenizer = Tokenizer(proto)
    for scene in SCENES[::7]:
        assert len(tokenizer.encode(scene.caption)) == len(scene.caption.split()) + 1
        assert tokenizer.encode(scene.caption.upper()) == tokenizer.encode(scene.caption)
    assert tokenizer.encode("") == [Tokenizer.eos_id]


def test_training_captions_are_spoken_or_silent_in_the_right_rows():
    captions = [scene.caption for scene in TRAINED]
    ids, mask = token_table(Tokenizer(train_tokenizer(), TEXT_LEN), captions)
    assert len(ids) == 2 * len(captions) + DROPPED_ROWS
    assert mask.sum(1)[2 * len(captions)] == 1, "the empty prompt is its end token"
    scene = torch.arange(len(captions)).repeat(20)
    rows = caption_rows(scene)
    silent = rows >= 2 * len(captions)
    assert torch.equal(rows[~silent] % len(captions), scene[~silent])
    assert silent.float().mean() == pytest.approx(0.12, abs=0.01)


def test_nothing_held_out_is_drawn():
    assert not set(TRAINED) & set(HELD_OUT)
    assert len(TRAINED) + len(HELD_OUT) == 1120
    clips, scene = Drawing(Size(5, 32, 32), torch.device("cpu"), seed=0).draw(20)
    again, _ = Drawing(Size(5, 32, 32), torch.device("cpu"), seed=0).draw(20)
    assert torch.equal(clips, again)
    assert scene.max() < len(TRAINED)


def test_image_rows_are_the_pipelines_channels():
    vae = VideoVAE(CONFIG)
    clips = draw(SCENES[:2], seed=0, frames=9, height=32, width=32)
    with torch.no_grad():
        ours = image_rows(vae, clips, torch.tensor([False, True]))
        first_only = image_channels(vae, clips[:1, :, :1], None, 9)
        both = image_channels(vae, clips[1:, :, :1], clips[1:, :, -1:], 9)
    torch.testing.assert_close(ours, torch.cat([first_only, both]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("low", "high", "shift"), [(0.0, 0.885, 3.0), (0.865, 1.0, 5.0)])
def test_sigmas_fill_their_range_evenly_in_shifted_time(low: float, high: float, shift: float):
    sigma = draw_sigmas(512, low, high, shift, torch.device("cpu")).double()
    assert sigma.min() >= low - 1e-6
    assert sigma.max() <= high + 1e-6
    assert (sigma.diff() > -1e-6).all()
    middle = sum(s / (shift - (shift - 1) * s) for s in (low, high)) / 2
    assert float(sigma.median()) == pytest.approx(shift * middle / (1 + (shift - 1) * middle), abs=0.01)


def test_a_ring_replaces_its_oldest_rows():
    ring = Ring(4)
    for start in (0, 3, 6):
        ring.add(value=torch.arange(start, start + 3))
        assert set(ring.sample(200)["value"].tolist()) == set(range(max(0, start - 1), start + 3))
