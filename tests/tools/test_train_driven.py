"""The driven embedded model is trained on what the pipeline gives it, by the arithmetic that the pipeline runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.tiny.clips import Drawing, Size
from tools.tiny.driven import (
    DRIVEN,
    VISION,
    DrivenRing,
    TrainedAttention,
    as_stored,
    driven_losses,
    driven_velocity,
    latent_rows,
    write_vision,
)
from tools.tiny.experts import initialise
from wan_core.checkpoint import load_vae
from wan_core.checkpoint.encoders import load_vision
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.vision.clip import VisionEncoder
from wan_core.models.wan.families import find_task
from wan_core.models.wan.families.animate2.inputs import clip_inputs
from wan_core.models.wan.families.animate2.model import Animate2Model
from wan_core.models.wan.families.clips import Clip
from wan_core.ops.attention.sdpa import SDPA
from wan_core.pipeline.sources import TINY
from wan_lab.driving import draw_trios
from wan_lab.shapes import SCENES, scene_table


@pytest.fixture(scope="module")
def vae() -> VideoVAE:
    return load_vae(TINY / "vae.safetensors", dtype=torch.float32)


@pytest.fixture(scope="module")
def model() -> Animate2Model:
    torch.manual_seed(0)
    model = Animate2Model(DRIVEN)
    initialise(model)
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    return model


@torch.no_grad()
def test_rows_are_the_pipelines_conditioning(vae: VideoVAE):
    trio = draw_trios(
        scene_table(SCENES[3:5]), generator=torch.Generator().manual_seed(1), frames=9, height=32, width=48
    )
    carried = torch.tensor([False, True])
    rows = latent_rows(vae, trio, carried)
    for n in range(2):
        media = {"reference": trio.reference[n : n + 1, :, None], "pose_video": trio.driving[n : n + 1]}
        if carried[n]:
            media["carried"] = trio.made[n : n + 1, :, :1]
        clip = Clip(n, 0, 9, n)
        seen = dict.fromkeys(("reference", "pose_video"), torch.zeros(1))
        inputs = clip_inputs(find_task("animate2-tiny"), vae, seen, media, clip)
        torch.testing.assert_close(rows["image"][n : n + 1], inputs["concat"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rows["pose"][n : n + 1], inputs["inputs"]["pose"][:, :16], atol=1e-4, rtol=1e-4)
        assert inputs["inputs"]["pose"].shape[1] == 36 and inputs["inputs"]["log_scale"] == 0
    assert rows["latent"].shape == (2, 16, 4, 4, 6) and rows["outline"].shape == (2, 1, 4, 4, 6)
    torch.testing.assert_close(rows["latent"][:, :, :1], rows["image"][:, 4:, :1])


@torch.no_grad()
def test_training_computes_what_the_model_does(model: Animate2Model):
    x, pose = torch.randn(2, 36, 4, 4, 6), torch.randn(2, 16, 3, 4, 6)
    text, seen, first = torch.randn(2, 5, 64), torch.randn(2, 257, 80), torch.randn(2, 257, 80)
    timestep = torch.tensor([400.0, 950.0])
    channels = torch.cat([pose, torch.ones_like(pose[:, :4]), pose], 1)
    expected = model(x, timestep, text, image=seen, pose=channels, pose_image=first)
    before = [block.self_attn.attend for block in model.blocks]
    for block in model.blocks:
        block.self_attn.attend = TrainedAttention(SDPA)
    try:
        velocity = driven_velocity(model, x, timestep, text, seen, pose, first)
    finally:
        for block, attend in zip(model.blocks, before, strict=True):
            block.self_attn.attend = attend
    torch.testing.assert_close(velocity, expected, atol=1e-5, rtol=1e-5)
    other = model(x, timestep, text, image=seen, pose=channels.roll(1, 2), pose_image=first)
    assert not torch.allclose(other, expected, atol=1e-3), "the driving video decides"


def test_every_weight_is_trained(vae: VideoVAE, model: Animate2Model):
    for block in model.blocks:
        block.self_attn.attend = TrainedAttention(SDPA)
    vision = VisionEncoder(VISION)
    torch.nn.init.normal_(vision.positions, std=0.02)
    ring = DrivenRing(Drawing(Size(5, 32, 32), torch.device("cpu"), 0), vae, 4)
    ring.grow(4)
    loss = driven_losses(model, vision, ring, lambda row: torch.randn(len(row), 5, 64), 4)()["driven"]
    loss.backward()
    without = [
        name
        for module in (model, vision)
        for name, parameter in module.named_parameters()
        if parameter.grad is None or not bool(parameter.grad.abs().sum() > 0)
    ]
    assert without == []


def test_the_clip_encoder_is_read_back(tmp_path: Path):
    vision = VisionEncoder(VISION)
    write_vision(vision, tmp_path)
    read = load_vision(tmp_path / "clip_vision.safetensors", dtype=torch.float32)
    assert read.config == VISION
    for name, value in vision.state_dict().items():
        assert torch.equal(read.state_dict()[name], value.half().float()), name


def test_videos_from_files_look_a_little_different():
    video = draw_trios(scene_table(SCENES[:2]), generator=torch.Generator().manual_seed(0), frames=5).driving
    stored = as_stored(video, torch.Generator().manual_seed(0))
    assert stored.shape == video.shape and 0 < float((stored - video).abs().mean()) < 0.05
