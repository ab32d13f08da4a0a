"""The speech encoder against transformers' Wav2Vec2Model on tiny random weights in float32, its files, and what video
frames hear against the official code."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

from tests.animate_references import DATA
from tests.s2v_references import SOUNDS, draw_states
from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.load import load_speech
from wan_core.models.wan.families.s2v.inputs import audio_features, clip_count, resampled


@pytest.fixture(scope="module")
def theirs() -> Wav2Vec2Model:
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=2, intermediate_size=96, conv_dim=(32,) * 7,
        feat_extract_norm="layer", conv_bias=True, do_stable_layer_norm=True, num_conv_pos_embeddings=128,
    )  # fmt: skip
    model = Wav2Vec2Model(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(scope="module")
def state(theirs) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in theirs.state_dict().items()}


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("samples", [400, 719, 16000, 23456])
def test_matches_transformers(theirs, state, samples):
    """Loud and with an offset: the reference takes both off. The last state is normalised, as transformers 4 gave it
    among the hidden states and ComfyUI does; transformers 5 gives it beside them."""
    sound = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.3 + 0.1
    prepared = Wav2Vec2FeatureExtractor(do_normalize=True)(sound.numpy(), sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        out = theirs(prepared.input_values, output_hidden_states=True)
        expected = torch.stack([*out.hidden_states[:-1], out.last_hidden_state], 1)
        states = load_speech(state)(sound[None])
    assert states.shape == expected.shape and states.shape[1] == 4
    assert distance(states, expected) <= 1e-5


def older(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the names that files of Hugging Face have, and what S2V does not use."""
    new = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    renamed = {}
    for name, value in state.items():
        for theirs, ours in new.items():
            name = name.replace(theirs, ours)
        renamed[f"wav2vec2.{name}"] = value
    return {**renamed, "lm_head.weight": torch.zeros(3, 128), "lm_head.bias": torch.zeros(3)}


def test_files_of_hugging_face_and_comfyui_load(state, tmp_path):
    """ComfyUI's is in float16, and computed in float32."""
    save_file(older(state), tmp_path / "model.safetensors")
    save_file({name: value.half() for name, value in state.items()}, tmp_path / "half.safetensors")
    sound = torch.randn(1, 4000)
    one, other, half = (
        load_speech(source)(sound) for source in (state, tmp_path / "model.safetensors", tmp_path / "half.safetensors")
    )
    assert torch.equal(one, other)
    assert half.dtype == torch.float32 and 0 < distance(half, one) < 5e-3


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("encoder.layers.1.attention.k_proj.bias", r"missing \(encoder\.layers\.1"),
        ("encoder.pos_conv_embed.conv.parametrizations.weight.original0", "weight_g or weight_v is missing"),
        ("feature_extractor.conv_layers.2.layer_norm.weight", "of another kind, 128 wide"),
        ("feature_extractor.conv_layers.0.conv.weight", "not a wav2vec 2.0 speech encoder"),
    ],
)
def test_a_damaged_or_other_file_is_named(state, gone, message):
    with pytest.raises(CheckpointError, match=message):
        load_speech({name: value for name, value in state.items() if name != gone})


@pytest.mark.parametrize(("length", "clip"), SOUNDS)
def test_video_frames_hear_what_the_official_code_has(length, clip):
    """Bit for bit: resampling, indices, zeros after the sound, number of clips."""
    states = draw_states(length)
    features = audio_features(states, clip)
    with safe_open(DATA / "s2v_official.safetensors", "pt") as references:
        assert torch.equal(features, references.get_tensor(f"features {length} {clip}"))
    assert features.shape[-1] == clip * clip_count(resampled(states).shape[1], clip)
