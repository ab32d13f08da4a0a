"""LoRA files: what is ignored is said, what is not applied is refused by name, and which expert a file is for."""

from __future__ import annotations

import pytest
import torch

from tests.lora_models import CONFIG, lora_of, shapes
from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.save import write_safetensors
from wan_core.config import LoraOptions
from wan_core.pipeline.loras import read_loras


def test_what_is_ignored_is_said_by_name():
    state = lora_of(["blocks.0.self_attn.q"], 15) | {
        "lora_te_text_model_encoder.lora_down.weight": torch.zeros(2, 2),
        "something.else": torch.zeros(2),
        "diffusion_model.blocks.99.ffn.0.lora_up.weight": torch.zeros(2, 2),
        "diffusion_model.img_emb.proj.0.diff": torch.zeros(2),
        "diffusion_model.patch_embedding.diff": torch.zeros(128, 36, 1, 2, 2),
        "diffusion_model.blocks.0.self_attn.k.lora_mid.weight": torch.zeros(2, 2),
        "diffusion_model.blocks.0.self_attn.k.lora_up.weight": torch.zeros(128, 2),
        "diffusion_model.blocks.0.self_attn.k.lora_down.weight": torch.zeros(2, 128),
    }
    lora = read_lora(state, shapes())
    assert set(lora.changes) == {"blocks.0.self_attn.q.weight"}
    assert sorted(name for names in lora.ignored.values() for name in names) == sorted(
        name for name in state if ".self_attn.q." not in name
    )
    for part in ("text encoder", "something.else", "does not have", "patch_embedding.diff", "Tucker"):
        assert part in lora.words()
    with pytest.raises(CheckpointError, match=r"changes nothing in this model.*made for another model"):
        read_lora({"diffusion_model.blocks.77.self_attn.q.lora_up.weight": torch.zeros(4, 4)}, shapes())


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        ("OFT", {"oft_blocks": torch.zeros(32, 4, 4), "alpha": torch.tensor(0.0)}),
        ("OFT", {"oft_blocks": torch.zeros(2, 32, 4, 4), "rescale": torch.ones(128, 1)}),
        ("OFT", {"oft_R.weight": torch.zeros(32, 6)}),
        ("GLoRA", {f"{role}.weight": torch.zeros(4, 4) for role in ("a1", "a2", "b1", "b2")}),
        ("Tucker", {f"lora_{role}.weight": torch.zeros(4, 4) for role in ("up", "mid", "down")}),
        ("weights in place", {"set_weight": torch.zeros(128, 128)}),
    ],
)
def test_a_kind_that_is_not_applied_is_refused_for_that(kind, roles):
    state = {f"diffusion_model.blocks.0.self_attn.q.{role}": value for role, value in roles.items()}
    with pytest.raises(CheckpointError, match=f"{kind}.* not applied.*Merge this file.*in ComfyUI") as refused:
        read_lora(state, shapes())
    assert "another model" not in str(refused.value)


QUERY, UP, DOWN = "blocks.0.self_attn.q", torch.zeros(128, 4), torch.zeros(4, 128)


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        ({"weight": torch.zeros(128, 128)}, "not a LoRA"),
        ({"lora_up.weight": torch.zeros(5120, 4), "lora_down.weight": torch.zeros(4, 5120)}, "of another shape"),
        ({"lora_up.weight": UP}, "no counterpart"),
        ({"lokr_w2": torch.zeros(16, 16)}, "no counterpart"),
        ({"hada_w2_a": torch.zeros(128, 2)}, "no counterpart"),
        ({"alpha": torch.zeros(())}, "not a LoRA|have no factors"),
        ({"lora_up.weight": UP, "lora_down.weight": torch.zeros(3, 128)}, "do not match"),
        ({"lora_up.weight": UP, "lora_B.weight": UP}, "both change"),
        ({"lora_up.weight": UP.to(torch.int8), "lora_down.weight": DOWN}, "must be floating point"),
        ({"lora_up.weight": UP, "lora_down.weight": DOWN, "alpha": torch.tensor(float("nan"))}, "must be one number"),
    ],
)
def test_clear_errors(roles, says):
    with pytest.raises(CheckpointError, match=says):
        read_lora({f"{QUERY}.{role}": value for role, value in roles.items()}, shapes())


def test_one_file_for_both_experts_is_split():
    """Diffusers calls the second expert transformer_2."""
    high, low = lora_of(["blocks.0.ffn.0"], 1), lora_of(["blocks.1.ffn.0"], 2)
    state = {n.replace("diffusion_model.", "transformer."): t for n, t in high.items()}
    state |= {n.replace("diffusion_model.", "transformer_2."): t for n, t in low.items()}
    assert set(read_lora(state, shapes(), "high").changes) == {"blocks.0.ffn.0.weight"}
    assert set(read_lora(state, shapes(), "low").changes) == {"blocks.1.ffn.0.weight"}


def test_a_file_of_the_second_expert_alone_is_its(tmp_path):
    state = {n.replace("diffusion_model.", "transformer_2."): t for n, t in lora_of(["blocks.1.ffn.0"], 2).items()}
    write_safetensors(state, tmp_path / "style.safetensors", {})
    for expert in ("auto", "low"):
        by_expert = read_loras([LoraOptions(path=str(tmp_path / "style.safetensors"), expert=expert)], CONFIG, True)
        assert not by_expert["high"] and set(by_expert["low"][0].lora.changes) == {"blocks.1.ffn.0.weight"}
    with pytest.raises(CheckpointError, match="for the other expert"):
        read_loras([LoraOptions(path=str(tmp_path / "style.safetensors"), expert="high")], CONFIG, True)


@pytest.mark.parametrize(
    ("name", "metadata", "option", "expert"),
    [
        ("style_low", {}, "auto", "low"),
        ("style_low", {"expert": "high"}, "auto", "high"),
        ("style_high", {"expert": "high"}, "low", "low"),
    ],
)
def test_an_option_counts_before_metadata_and_metadata_before_the_name(tmp_path, name, metadata, option, expert):
    """Names themselves are in tests/pipeline/test_expert_names.py."""
    path = tmp_path / f"{name}.safetensors"
    write_safetensors(lora_of(["blocks.1.ffn.0"], 2), path, metadata)
    by_expert = read_loras([LoraOptions(path=str(path), expert=option)], CONFIG, True)
    assert [one for one, loras in by_expert.items() if loras] == [expert]
