"""A text encoder whose blocks stream: the rows of one that is on the device as a whole, and when a plan chooses it."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.checkpoint import load_text_encoder
from wan_core.checkpoint.detect import empty_module
from wan_core.checkpoint.random import random_module
from wan_core.config import LoadOptions, Request
from wan_core.execution.memory.host_weights import tensors_of
from wan_core.execution.memory.planning import (
    Sizes,
    beside_weights,
    limited,
    plan_memory,
    unit_bytes,
)
from wan_core.execution.memory.residency import Residency
from wan_core.execution.memory.streaming import SLOTS, stage_bytes
from wan_core.models.text.umt5 import UMT5_XXL, TextEncoder, UMT5Encoder
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import T2V_A14B
from wan_core.ops.quant.packed import Packed, put_packed
from wan_core.pipeline.model_parts import Part
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import PartToLoad
from wan_core.pipeline.sources import TINY

CPU = torch.device("cpu")
PROMPTS = ["a red circle", "", "a green square moving up on a white background", "a blue cross"]


@cache
def plain(packed: bool) -> TextEncoder:
    """Five layers, in float32 or with matrices that stay in FP8."""
    embedded = load_text_encoder(TINY / "text_encoder.safetensors", dtype=torch.float32)
    encoder = random_module(replace(embedded.encoder.config, num_layers=5), device="cpu", dtype=torch.float32, seed=1)
    assert isinstance(encoder, UMT5Encoder)
    if packed:
        weights = {n: m.weight.detach() for n, m in encoder.named_modules() if isinstance(m, torch.nn.Linear)}
        parts = {
            name: {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.tensor([0.5])}
            for name, weight in weights.items()
        }
        packs = [(n, Packed("fp8", tuple(weights[n].shape), part)) for n, part in parts.items()]
        put_packed(encoder, packs, torch.float32, CPU)
        values = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}
        encoder.load_state_dict({**dict(encoder.named_parameters()), **values}, assign=True)
    return TextEncoder(encoder.requires_grad_(False).eval(), embedded.tokenizer)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_streamed_is_resident_bit_for_bit(packed, streams):
    exact = plain(packed)
    residency = Residency(CPU, "swap", streams_text=streams)
    residency.add("text_encoder", copy.deepcopy(exact))
    (stage,) = residency.stages.values()
    for prompts in ([PROMPTS[0]], PROMPTS[1:3], [PROMPTS[3]], PROMPTS):
        encoder = residency.use("text_encoder")
        assert torch.equal(encoder.encode(prompts), exact.encode(prompts))
        whole = sum(tensor.nbytes for tensor in tensors_of(exact).values())
        assert (stage.held < whole) == streams and len(stage.slots) == (SLOTS if streams else 0)
        assert (stage.latest is not None) == streams  # blocks came one by one
    residency.release("text_encoder")
    assert stage.held == 0
    assert torch.equal(residency.use("text_encoder").encode(PROMPTS), exact.encode(PROMPTS))


def test_out_of_memory_makes_it_stream():
    residency = Residency(CPU, "swap", room=1 << 40)
    residency.add("text_encoder", copy.deepcopy(plain(False)))
    changes = [residency.cheaper("text_encoder") for _ in range(3)]
    assert "one model at a time" in str(changes[0]) and "text encoder stream" in str(changes[1]) and changes[2] is None
    assert torch.equal(residency.use("text_encoder").encode(PROMPTS), plain(False).encode(PROMPTS))


def test_the_stage_takes_the_bytes_that_were_planned():
    encoder = plain(False)
    residency = Residency(CPU, "swap", streams_text=True)
    residency.add("text_encoder", copy.deepcopy(encoder))
    residency.use("text_encoder")
    (stage,) = residency.stages.values()
    config, count = encoder.encoder.config, sum(p.numel() for p in encoder.parameters())
    part = Part("made here", config, torch.float32, count, lambda *_: encoder)
    planned = stage_bytes(PartToLoad(part, torch.float32).units, 0)
    assert abs(planned - stage.held) < 0.05 * planned


WHOLE = sum(p.numel() for p in empty_module(UMT5_XXL).parameters())


@given(gib=st.floats(6, 80), fp8=st.booleans(), text_fp8=st.booleans(), experts=st.integers(1, 2))
def test_it_streams_where_it_does_not_fit_and_nowhere_else(gib, fp8, text_fp8, experts):
    """UMT5 XXL, in bf16 or as ComfyUI's FP8 file has it, on any card: its phase fits from 6 GiB on."""
    table = UMT5_XXL.vocab_size * UMT5_XXL.dim * 2
    text = table + (WHOLE - table // 2) * (1 if text_fp8 else 2)
    stage = stage_bytes((table, *[(text - table) // UMT5_XXL.num_layers] * UMT5_XXL.num_layers), 0)
    units = unit_bytes(T2V_A14B, 2, fp8)
    sizes = Sizes(units=units, experts=experts, text_encoder=text, vae=254_000_000, text_stage=stage)
    activations = beside_weights(T2V_A14B, VAE_21, (1, 16, 21, 80, 80), per_token=5.05)
    plan = plan_memory(sizes, activations, limited(gib))
    phase = plan.phases[0]
    assert phase.total <= plan.room
    assert plan.streams_text == (plan.policy != "resident" and text + activations.text > plan.room)
    assert phase.weights >= (stage if plan.streams_text else text)
    assert plan.beside["text_encoder"] == activations.text


def test_a_pipeline_that_streams_makes_the_same_video():
    request = Request(prompt=PROMPTS[2], steps=1, width=32, height=32, frames=5)
    latents = []
    for options in ({}, {"residency": "stream"}):
        pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", **options))
        latents.append(pipe.generate(request).latents)
    assert torch.equal(*latents) and pipe.models.residency.streams_text
    pipe.models.text_encoder()
    assert any(stage.slots for stage in pipe.models.residency.stages.values())
