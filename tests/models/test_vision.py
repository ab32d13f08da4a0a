"""The CLIP vision encoder against transformers' CLIPVisionModel, on tiny random weights in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel

from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.load import load_vision
from wan_core.models.vision.clip import MEAN, STD

LAYERS = 3


def huggingface() -> CLIPVisionModel:
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=160, intermediate_size=224, num_hidden_layers=LAYERS, num_attention_heads=2, image_size=56,
        patch_size=14, hidden_act="gelu",
    )  # fmt: skip
    model = CLIPVisionModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def names_of(model: CLIPVisionModel) -> dict[str, Tensor]:
    """With `vision_model.`, as files have it: transformers 5 leaves it out of the module."""
    state = {f"vision_model.{name.removeprefix('vision_model.')}": value for name, value in model.state_dict().items()}
    return {**state, "visual_projection.weight": torch.zeros(8, 160)}


def official(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as Wan2.1's `.pth` has them, with parts that are not used."""
    of = {name.removeprefix("vision_model."): value for name, value in state.items()}
    official_state = {
        "visual.cls_embedding": of["embeddings.class_embedding"].view(1, 1, -1),
        "visual.pos_embedding": of["embeddings.position_embedding.weight"][None],
        "visual.patch_embedding.weight": of["embeddings.patch_embedding.weight"],
        "visual.head": torch.zeros(160, 8),
        "textual.token_embedding.weight": torch.zeros(4, 4),
        "log_scale": torch.zeros(()),
    }
    renamed = {"layer_norm1": "norm1", "self_attn.out_proj": "attn.proj", "layer_norm2": "norm2"}
    for kind in ("weight", "bias"):
        official_state[f"visual.pre_norm.{kind}"] = of[f"pre_layrnorm.{kind}"]
        for n in range(LAYERS):
            theirs, ours = f"encoder.layers.{n}", f"visual.transformer.{n}"
            official_state[f"{ours}.attn.to_qkv.{kind}"] = torch.cat(
                [of[f"{theirs}.self_attn.{p}_proj.{kind}"] for p in "qkv"]
            )
            for a, b in {**renamed, "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.2"}.items():
                official_state[f"{ours}.{b}.{kind}"] = of[f"{theirs}.{a}.{kind}"]
    return official_state


@torch.no_grad()
@pytest.mark.parametrize("layout", ["huggingface", "official"])
def test_matches_transformers(layout: str) -> None:
    theirs = huggingface()
    state = names_of(theirs)
    ours = load_vision(state if layout == "huggingface" else official(state))
    image = torch.rand(2, 3, 40, 72, generator=torch.Generator().manual_seed(1)) * 2 - 1
    stretched = torch.nn.functional.interpolate(image, (56, 56), mode="bicubic") / 2 + 0.5
    pixels = (stretched - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    expected = theirs(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
    features = ours(image)
    assert features.shape == (2, 17, 160)
    assert (features - expected).abs().max() <= 1e-4


@torch.no_grad()
def test_scaled_fp8_is_multiplied_out() -> None:
    state, scaled, image = names_of(huggingface()), dict[str, Tensor](), torch.rand(1, 3, 56, 56)
    for name, value in [*state.items()]:
        if name.endswith(("fc1.weight", "q_proj.weight")):
            scale = value.abs().max() / 448
            scaled[name], scaled[f"{name[:-6]}scale_weight"] = (value / scale).to(torch.float8_e4m3fn), scale
            state[name] = scaled[name].float() * scale
    assert len(scaled) == 4 * LAYERS
    assert torch.equal(load_vision(state | scaled)(image), load_vision(state)(image))


def test_what_is_no_clip_vision_encoder_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"clip_vision_h\.safetensors"):
        load_vision({"blocks.0.weight": torch.zeros(2)})
    state = names_of(huggingface())
    del state["vision_model.encoder.layers.1.mlp.fc1.bias"]
    with pytest.raises(CheckpointError, match=r"1 tensor is missing \(layers\.1\.fc1\.bias\)"):
        load_vision(state)
    state = names_of(huggingface())
    state["vision_model.encoder.layers.0.layer_norm1.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="of a wrong shape"):
        load_vision(state)
