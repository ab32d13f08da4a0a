"""The pipeline over files that a user might have: releases of small random models, swapping, repeated runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from PIL import Image

from wan_core.checkpoint import load_text_encoder, save
from wan_core.checkpoint.random import random_module
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.execution.memory.residency import Residency
from wan_core.media.video import load_image
from wan_core.models.vae.config import VAE_22
from wan_core.models.wan.config import DiTConfig
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import find_models

CAPTION = "a red circle moving right on a blue background"


@pytest.fixture(scope="module")
def ti2v_release(tmp_path_factory, tiny_assets):
    """A release of the 5B layout in miniature: one transformer of 48 channels, a 2.2 VAE, the embedded text encoder."""
    folder = tmp_path_factory.mktemp("ti2v")
    dit = DiTConfig(
        in_channels=48, out_channels=48, dim=64, ffn_dim=96, num_heads=2, num_layers=2, text_dim=64, text_len=32
    )
    vae = dataclasses.replace(VAE_22, encoder_dim=16, decoder_dim=16, dim_mult=(1, 1, 1, 1), num_res_blocks=1)
    save(random_module(dit, device="cpu", dtype=torch.float32), folder / "high_noise_model.safetensors")
    save(random_module(vae, device="cpu", dtype=torch.float32), folder / "vae.safetensors")
    save(load_text_encoder(tiny_assets / "text_encoder.safetensors"), folder / "text_encoder.safetensors")
    return folder


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "first.png"
    Image.effect_mandelbrot((96, 64), (-2, -1.2, 1, 1.2), 30).convert("RGB").save(path)
    return path


SMALL = {"width": 96, "height": 64, "frames": 9, "steps": 3}


def test_one_transformer_with_a_known_first_frame(ti2v_release, picture):
    """TI2V through files: the first latent frame is the image's, in the result too."""
    request = Request(prompt=CAPTION, image=str(picture), **SMALL)
    pipe = Pipeline.load(LoadOptions(model=str(ti2v_release), device="cpu"), request=request)
    result = pipe.generate(request)
    assert result.plan.name == "ti2v-5B" and result.plan.experts == ("high",) and result.frames.shape == (9, 64, 96, 3)
    vae = pipe.models.vae()
    first = torch.from_numpy(load_image(picture).copy()).permute(2, 0, 1)[None, :, None] * 2 - 1
    torch.testing.assert_close(result.latents[:, :, :1], vae.encode(first), rtol=1e-4, atol=1e-4)
    assert not torch.equal(result.latents, pipe.generate(dataclasses.replace(request, image=None)).latents)


def test_models_that_take_turns_make_the_same_video(ti2v_release):
    """`swap` on a CPU moves nothing, but goes through every acquire and release."""
    request = Request(prompt=CAPTION, **SMALL)
    resident = Pipeline.load(LoadOptions(model=str(ti2v_release), device="cpu"))
    turns = Pipeline.load(LoadOptions(model=str(ti2v_release), device="cpu"))
    residency = Residency(torch.device("cpu"), "swap")
    for name, model in turns.models.residency.models.items():
        residency.add(name, model)
    turns.models = dataclasses.replace(turns.models, residency=residency)
    result = turns.generate(request)
    assert torch.equal(result.latents, resident.generate(request).latents)
    assert {"fetch text encoder", "fetch high", "fetch vae"} <= result.report.phases.keys()


def test_every_run_has_a_report_of_its_own(ti2v_release, picture):
    pipe = Pipeline.load(LoadOptions(model=str(ti2v_release), device="cpu"))
    first = pipe.generate(Request(prompt=CAPTION, image=str(picture), **SMALL)).report
    second = pipe.generate(Request(prompt=CAPTION, **SMALL)).report
    assert first.phases["denoise high"].steps == second.phases["denoise high"].steps == 3
    assert "image" in first.settings and "image" not in second.settings
    assert len(first.notes) == len(second.notes) and "load" in second.phases


def test_parts_that_do_not_belong_together_are_refused(ti2v_release, tiny_assets):
    wrong_vae = LoadOptions(model=str(ti2v_release), vae=str(tiny_assets / "vae.safetensors"))
    with pytest.raises(OptionError, match="16 latent channels"):
        find_models(wrong_vae)
    with pytest.raises(OptionError, match="the experts differ"):
        find_models(LoadOptions(model="tiny", low=str(tiny_assets / "i2v_low.safetensors")))
