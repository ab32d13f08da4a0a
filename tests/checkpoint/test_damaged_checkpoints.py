"""Checkpoints that are wrong or damaged: each is refused in one line."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.small_models import DIT, LOADERS, Model, model, official_file, refusal
from wan_core.checkpoint import (
    detect,
    load_dit,
    load_text_encoder,
    load_vae,
)
from wan_core.checkpoint.save import write_safetensors
from wan_core.models.wan.families.plain import read_config
from wan_core.models.wan.model import WanModel


@pytest.mark.parametrize("kind", ["dit", "text", "vae 2.1"])
def test_swapped_parts_name_both(kind: str, tmp_path: Path) -> None:
    m, descriptions = (
        model(kind),
        {"dit": "a Wan transformer", "text_encoder": "a UMT5 text encoder", "vae": "a Wan VAE"},
    )
    for wanted in descriptions.keys() - {m.kind}:
        message = refusal(official_file(m, tmp_path), LOADERS[wanted])
        assert "model.safetensors" in message and descriptions[m.kind] in message and descriptions[wanted] in message


def edited(m: Model, edit: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    state = dict(m.official)
    edit(state)
    return state


@pytest.mark.parametrize("name", ["dit", "text", "vae 2.1", "vae 2.2"])
def test_missing_unexpected_and_wrong_tensors_are_listed(name: str) -> None:
    m = model(name)
    load = LOADERS[m.kind]
    tensor = list(m.official)[len(m.official) // 2]
    assert tensor in refusal(edited(m, lambda s: s.pop(tensor)), load)
    message = refusal(edited(m, lambda s: s.update({tensor + ".new": s.pop(tensor)})), load)
    assert tensor in message and tensor + ".new" in message
    assert "extra.thing" in refusal(edited(m, lambda s: s.update({"extra.thing": torch.zeros(1)})), load)
    wrong = refusal(edited(m, lambda s: s.update({tensor: torch.zeros(7, *s[tensor].shape[1:])})), load)
    for old, new in (("(", "["), (",)", "]"), (")", "]")):
        wrong = wrong.replace(old, new)
    assert tensor in wrong and str(list(m.official[tensor].shape)) in wrong


def test_sides_of_patches_may_differ() -> None:
    with torch.device("meta"):
        shapes = {
            name: tuple(one.shape) for name, one in WanModel(replace(DIT, patch_size=(1, 2, 4))).state_dict().items()
        }
    assert read_config(shapes, {}).patch_size == (1, 2, 4)


def test_absurd_numbers_are_refused_before_anything_is_built() -> None:
    def stretched(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        return edited(model("dit"), lambda s: s.update({name: torch.empty(shape)}))

    far = {n.replace("blocks.1.", "blocks.99999."): t for n, t in model("dit").official.items()}
    assert "100000 blocks, and at most 200" in refusal(far)
    assert "text_embedding.0.weight" in refusal(stretched("text_embedding.0.weight", (0, 2**40)))
    assert "patches" in refusal(stretched("patch_embedding.weight", (256, 16, 99, 1, 1)))
    assert "num_heads" in refusal({n: t[:200] if t.shape[0] == 256 else t for n, t in model("dit").official.items()})


@pytest.mark.parametrize(
    ("names", "message_part"),
    [
        (["blocks.0.self_attn.q.weight_scale_2"], "scaled"),
        (["face_adapter.fuser_blocks.0.linear1_q.weight"], "animate"),
        (["zip_motion_out.1.weight"], "S2V"),
        (["vace_blocks.0.after_proj.weight"], "vace"),
        (["img_emb.emb_pos", "blocks.0.cross_attn.k_img.weight"], "first-and-last-frame"),
        (["control_adapter.conv.weight"], "camera"),
        (["ref_conv.weight"], "fun-control"),
        (["img_in_ref.weight"], "Fun"),
        (["blocks.0.self_attn.attn_op.local_attn.proj_l.weight"], "TurboDiffusion"),
        (["blocks.0.to_gate_compress.weight"], "FastVideo"),
    ],
)
def test_extended_transformers_are_said_by_name(names: list[str], message_part: str, tmp_path: Path) -> None:
    for prefix in ("", "model.diffusion_model."):
        state = {prefix + n: t for n, t in model("dit").official.items()} | {prefix + n: torch.zeros(2) for n in names}
        write_safetensors(state, tmp_path / "file.safetensors", {})
        message = refusal(tmp_path / "file.safetensors")
        assert message_part in message and "file.safetensors" in message and "a Wan transformer" in message


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("diffusion_model.blocks.0.self_attn.q.lora_A.weight", "LoRA"),
        ("lora_unet_blocks_0_self_attn_q.lora_up.weight", "LoRA"),
        ("transformer.blocks.0.attn1.to_q.lora_B.default.weight", "LoRA"),
        ("diffusion_model.blocks.0.self_attn.q.diff_b", "LoRA"),
        ("vision_model.encoder.layers.0.mlp.fc1.weight", "CLIP vision"),
        ("visual.transformer.resblocks.0.attn.in_proj_weight", "CLIP vision"),
        ("text_model.encoder.layers.0.mlp.fc1.weight", "CLIP text"),
        ("double_blocks.0.img_attn.qkv.weight", "Flux"),
        ("model.diffusion_model.input_blocks.0.0.weight", "Stable Diffusion"),
        ("decoder.up.0.block.0.conv1.weight", "VAE"),
        ("something.else", "something.else"),
    ],
)
def test_other_models_are_said_by_name(name: str, description: str, tmp_path: Path) -> None:
    write_safetensors({name: torch.zeros(2, 2)}, tmp_path / "file.safetensors", {})
    for load, wanted in ((load_dit, "a Wan transformer"), (load_vae, "a Wan VAE")):
        message = refusal(tmp_path / "file.safetensors", load)
        assert description in message and wanted in message and "file.safetensors" in message


def test_an_all_in_one_file_is_said_so() -> None:
    state = {"model.diffusion_model." + n: t for n, t in model("dit").official.items()}
    state |= {"vae." + n: t for n, t in model("vae 2.1").official.items()}
    assert "a transformer, a VAE" in refusal(state)


def test_a_tensor_stored_twice_must_agree() -> None:
    twice = {**model("text").foreign, "encoder.embed_tokens.weight": model("text").official["token_embedding.weight"]}
    assert detect(twice).kind == "text_encoder"
    twice["shared.weight"] = torch.zeros(3, 3)
    assert "twice" in refusal(twice, load_text_encoder) or "embedding" in refusal(twice, load_text_encoder)


def test_integer_weights_are_refused() -> None:
    state = edited(model("dit"), lambda s: s.update({"head.head.weight": s["head.head.weight"].to(torch.int8)}))
    assert "int8" in refusal(state)


@pytest.mark.parametrize(
    ("content", "description"),
    [
        (b"", "empty"),
        (bytes(5000), "zeros"),
        (b"GGUF\x03\0\0\0" + bytes(600), "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "git-lfs"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (pickle.dumps({"a": 1}), "pickle"),
        (b'{"error": "not found"}', "JSON"),
        (b"PK\x03\x04" + bytes(30), "archive"),
        (b"\xff\xfe\xfd\xfc" * 8, "ff fe fd fc"),
    ],
)
def test_files_that_are_no_checkpoints(content: bytes, description: str, tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.pth"):
        (tmp_path / name).write_bytes(content)
        message = refusal(tmp_path / name)
        assert description in message and name in message


def test_pickles_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"weight": torch.zeros(2), "evil": Evil()}, tmp_path / "evil.pth")
    message = refusal(tmp_path / "evil.pth")
    assert "evil.pth" in message and "refused" in message and "Path" in message and not (tmp_path / "ran").exists()


def test_archives_that_torch_did_not_write(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    assert "compressed" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "data.pkl" in refusal(path)
    torch.save({"a": {"b": [1, 2]}, "c": torch.zeros(1)}, path)
    assert "'a': dict" in refusal(path)
    torch.save([torch.zeros(1)], path)
    assert "list" in refusal(path)


def test_a_tensor_that_repeats_its_values_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1).expand(10**9)}, tmp_path / "wide.pth")
    assert "more values than are stored" in refusal(tmp_path / "wide.pth")
