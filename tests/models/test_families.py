"""What holds for every family that takes inputs beside the text: prepared inputs, refused ones, files, sizes.

That each input counts is what parity with other programs shows, in the file of each family.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import wan_core
from tests.animate_references import ANIMATE2, TINY_ANIMATE, draw_weights
from tests.control_references import OWN
from tests.family_models import (
    ANIMATE2_METADATA,
    CONFIGS,
    distance,
    draw_inputs,
    load_tiny,
    run,
    same_weights,
)
from tests.int8_files import FORMATS, HOLD, described, encoded
from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.detect import detect, expected_shapes
from wan_core.models.wan.families.animate import ANIMATE_14B, CONVS
from wan_core.models.wan.families.fun import CAMERA_A14B, CONTROL_A14B
from wan_core.models.wan.families.s2v import S2V_14B
from wan_core.models.wan.families.vace import VACE_14B
from wan_core.ops.kernels.integer_weights import decode
from wan_core.ops.quant.packed import PackedLinear

EVERY = pytest.mark.parametrize("name", CONFIGS)
SOUND_LAYERS = ("audio_injector.", "casual_audio_encoder.encoder.final_linear")


def grid_of(name: str, batch: int = 1) -> tuple[int, int, int, int]:
    return (batch, 2, 4, 4) if name == "s2v" else (batch, 3, 2, 2)


@EVERY
@torch.no_grad()
def test_prepared_once_is_the_same(name: str) -> None:
    """Prompt and inputs are prepared once; branches along the batch see their rows, one control serves all videos."""
    model, sample = load_tiny(name), draw_inputs(CONFIGS[name], grid_of(name, 2))
    inputs = {key: sample[key] for key in sample.keys() - {"x", "timestep", "context"}}
    both = model.prepare_text(sample["context"], **inputs)
    for row in range(2):
        here = slice(row, row + 1)
        output = model(sample["x"][here], sample["timestep"][here], both.rows(row, row + 1))
        assert distance(output, run(model, {key: value[here] for key, value in sample.items()})) <= 1e-5
    if (own := OWN.get(CONFIGS[name].family)) is not None:
        one, twice = sample[own][:1], sample[own][:1].expand_as(sample[own])
        assert distance(run(model, sample, **{own: one}), run(model, sample, **{own: twice})) <= 1e-5


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("animate", {"face": torch.zeros(1, 3, 5, 16, 8)}, r"\[batch, 3, frames, 16, 16\]"),
        ("animate", {"face": torch.zeros(1, 3, 9, 16, 16)}, "for a video of 3"),
        ("animate2", {"pose": torch.zeros(1, 16, 2, 4, 4)}, "36 channels"),
        (
            "animate2",
            {"pose": torch.zeros(2, 36, 2, 4, 4), "pose_image": torch.zeros(3, 257, 1280)},
            "features for 2, 1, 3 videos",
        ),
        ("s2v", {"audio": torch.zeros(1, 25, 1024, 7)}, "4 frames for every latent frame"),
        ("s2v", {"audio": torch.zeros(1, 25, 768, 8)}, r"\[batch, 25, 1024, frames\]"),
    ],
)
def test_wrong_inputs_are_refused(name: str, changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(load_tiny(name), draw_inputs(CONFIGS[name], grid_of(name)), **changed)


# ---------------------------------------------------------------------------------------------------------------- files


def official(name: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under official names: Animate's with constant filters, Animate-2's blocks one level deeper."""
    if name == "animate2":
        return {re.sub(r"^(blocks\.\d+\.)", r"\1block.", key): value for key, value in weights.items()}
    if name == "animate":
        line = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        stages = range(1, len(TINY_ANIMATE.motion_channels))
        names = [f"{CONVS}.{n}.{part}.0.kernel" for n in stages for part in ("conv2", "skip")]
        return weights | {key: torch.outer(line, line) for key in names}
    return weights


def scaled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as ComfyUI's FP8 files have them: a scale for each matrix, also outside the blocks."""
    scaled_state = {"scaled_fp8": torch.zeros(1, dtype=torch.float8_e4m3fn)}
    for key, value in state.items():
        matrix = value.ndim == 2 and key.endswith("weight")
        if matrix and ("blocks." in key or key.startswith(("face_adapter.", *SOUND_LAYERS))):
            scale = value.abs().max() / 448
            scaled_state[key] = (value / scale).to(torch.float8_e4m3fn)
            scaled_state[key.removesuffix("weight") + "scale_weight"] = scale.reshape(1)
        else:
            scaled_state[key] = value
    return scaled_state


@EVERY
def test_official_comfyui_and_scaled_files_load(name, tmp_path):
    weights, path = draw_weights(CONFIGS[name]), tmp_path / "m.safetensors"
    state = official(name, weights)
    for prefix in ("", "model.diffusion_model."):
        save_file({prefix + key: value for key, value in state.items()}, path, {"num_heads": "2"})
        assert detect(path).names.keys() == weights.keys() and same_weights(wan_core.load_dit(path), weights)
    save_file(scaled(state), path, {"num_heads": "2"})
    loaded = wan_core.load_dit(path, dtype=torch.float32).state_dict()
    assert all((loaded[key] - value).abs().max() <= 0.07 * value.abs().max() for key, value in weights.items())


@pytest.mark.parametrize("config", [TINY_ANIMATE, ANIMATE2], ids=lambda config: config.family)
@torch.no_grad()
def test_int8_files_multiply_as_they_are(config):
    """With rotated rows, as ComfyUI's templates name them."""
    config = replace(config, dim=256, ffn_dim=512, num_heads=2)
    names, kind, state, meant = config.quantized_names(), "rotated 256", {}, {}
    for name, value in draw_weights(config).items():
        linear = name.removesuffix(".weight")
        if linear not in names:
            state[name] = meant[name] = value
            continue
        parts = encoded(kind, value)
        state |= {f"{linear}.{part}": tensor for part, tensor in parts.items()}
        state[f"{linear}.comfy_quant"] = torch.tensor(list(json.dumps(described(kind)).encode()), dtype=torch.uint8)
        meant[name] = decode(FORMATS[kind], parts)
    metadata = ANIMATE2_METADATA if config.family == "animate2" else {"num_heads": 2}
    wide = wan_core.load_dit(state, metadata, dtype=torch.float32)
    assert wide.config == config and same_weights(wide, meant)
    packed = wan_core.load_dit(state, metadata, dtype=torch.float32, quantization=HOLD)
    assert {name for name, module in packed.named_modules() if isinstance(module, PackedLinear)} == names
    inputs = draw_inputs(config, (1, 3, 4, 6))
    assert 0 < distance(run(packed, inputs), run(wide, inputs)) < 0.03


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("animate", "face_adapter.fuser_blocks.0.linear2.bias"),
        ("animate", f"{CONVS}.1.skip.1.weight"),
        ("animate2", "blocks.1.self_attn.q.bias"),
        ("s2v", "audio_injector.injector.1.norm_q.weight"),
        ("s2v", "frame_packer.proj_2x.bias"),
        ("vace", "vace_blocks.0.before_proj.weight"),
        ("vace", "vace_blocks.1.after_proj.bias"),
        ("vace", "vace_blocks.0.ffn.2.bias"),
        ("vace", "vace_patch_embedding.weight"),
        ("fun-control", "ref_conv.bias"),
        ("camera", "control_adapter.residual_blocks.0.conv2.weight"),
        ("camera 2.1", "img_emb.proj.1.weight"),
    ],
)
def test_a_missing_tensor_is_named(name, gone):
    weights = {key: value for key, value in draw_weights(CONFIGS[name]).items() if key != gone}
    with pytest.raises(CheckpointError, match=rf"missing \({gone}"):
        wan_core.load_dit(official(name, weights), {"num_heads": 2})


@pytest.mark.parametrize(
    ("config", "tensors", "parameters"),
    [
        (ANIMATE_14B, 1427, 17.27),  # without 14 constant filters of the official file
        (S2V_14B, 1260, 16.30),
        (VACE_14B, 1331, 17.34),
        (CAMERA_A14B, 1101, 14.79),
        (CONTROL_A14B, 1097, 14.29),
    ],
)
def test_full_size_parameter_counts(config, tensors, parameters):
    shapes = expected_shapes(config)
    assert len(shapes) == tensors
    assert round(sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9, 2) == parameters
