"""Checkpoints: every layout loads to the same tensors, nothing is copied, and what cannot be loaded is said by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.checkpoint.small_models import (
    DIT,
    SMALL_HEADS,
    WRITERS,
    foreign_folder,
    model,
    official_file,
    official_index,
    refusal,
    same_bits,
    spiece,
    tokenizer_file,
)
from tests.reference_models import diffusers_transformer
from wan_core.checkpoint import (
    CheckpointError,
    detect,
    find_parts,
    load_dit,
    load_text_encoder,
    open_checkpoint,
    save,
)
from wan_core.checkpoint.save import write_safetensors
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.wan.families.plain import parameter_names

# -------------------------------------------------------------------------------------- the same weights in two layouts


# -------------------------------------------------------------------------------------------- the ways to store weights


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("name", ["dit", "dit heads", "text", "vae 2.1", "vae 2.2"])
def test_every_layout_loads_to_the_same_bits(name: str, layout: str, tmp_path: Path) -> None:
    m = model(name)
    source = WRITERS[layout](m, tmp_path)
    options = {"tokenizer": tokenizer_file(tmp_path)} if m.kind == "text_encoder" and layout != "saved" else {}
    loaded = m.load(source, **options)
    assert same_bits(loaded.state_dict(), m.official)
    ours = m.module.encoder.config if isinstance(m.module, TextEncoder) else m.module.config
    if layout != "state_dict":
        assert loaded.config == ours
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())


@torch.no_grad()
def test_a_diffusers_transformer_computes_the_same(tmp_path: Path) -> None:
    """Names of equal shapes could be confused by a table without any shape being wrong: compare what comes out."""
    torch.manual_seed(1)
    theirs = diffusers_transformer(SMALL_HEADS).eval()
    for name, parameter in theirs.named_parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 30
        parameter.copy_(torch.randn_like(parameter) / fan_in**0.5 + float("norm" in name and name.endswith("weight")))
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load_dit(tmp_path)
    x, timestep, rows = torch.randn(1, 36, 2, 4, 6), torch.tensor([437.0]), torch.randn(1, 512, SMALL_HEADS.text_dim)
    assert torch.allclose(ours(x, timestep, rows), theirs(x, timestep, rows).sample, atol=2e-5, rtol=1e-4)


def test_the_tables_name_every_parameter() -> None:
    assert list(model("dit").official) == sorted(parameter_names((), 2), key=list(model("dit").official).index)
    for name in ("dit", "vae 2.1", "vae 2.2"):
        assert len(model(name).foreign) == len(model(name).official)


# ------------------------------------------------------------------------------------------------------- without copies


@pytest.mark.parametrize("layout", ["official_file", "pth", "foreign_folder", "official_index", "prefixed"])
def test_parameters_are_the_mapped_file(layout: str, tmp_path: Path) -> None:
    m = model("dit")
    checkpoint = open_checkpoint(WRITERS[layout](m, tmp_path))
    names = detect(checkpoint).names
    loaded = m.load(checkpoint)
    assert all(p.data_ptr() == checkpoint.read(names[n]).data_ptr() for n, p in loaded.named_parameters())


def test_writing_to_a_parameter_leaves_the_file_alone(tmp_path: Path) -> None:
    path = official_file(model("dit"), tmp_path)
    before = path.read_bytes()
    module = load_dit(path)
    module.blocks[0].modulation.data.fill_(7)
    assert path.read_bytes() == before and (module.blocks[0].modulation == 7).all()


# --------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_plain_fp8_becomes_bf16(stored: torch.dtype, tmp_path: Path) -> None:
    m = model("dit")
    keep = ("modulation", "norm")
    mixed = {n: t.float() if any(k in n for k in keep) else t.to(stored) for n, t in m.official.items()}
    write_safetensors(mixed, tmp_path / "fp8.safetensors", {})
    loaded = load_dit(tmp_path / "fp8.safetensors").state_dict()
    wanted = {n: t if t.dtype == torch.float32 else t.to(torch.bfloat16) for n, t in mixed.items()}
    assert same_bits(loaded, wanted)
    wide = load_dit(tmp_path / "fp8.safetensors", dtype=torch.float32).state_dict()
    assert {value.dtype for value in wide.values()} == {torch.float32}


def test_matrices_of_a_mixed_file_agree(tmp_path: Path) -> None:
    """A file with its patch embedding in float32 and its blocks in bfloat16 still runs."""
    m = model("dit")
    mixed = {n: t if "blocks" in n else t.float() for n, t in m.official.items()}
    write_safetensors(mixed, tmp_path / "mixed.safetensors", {})
    loaded = load_dit(tmp_path / "mixed.safetensors")
    assert loaded.patch_embedding.weight.dtype == loaded.text_embedding[0].weight.dtype == torch.bfloat16
    assert loaded.head.head.weight.dtype == loaded.time_embedding[0].weight.dtype == torch.float32
    out = loaded(torch.randn(1, 16, 1, 4, 4), torch.tensor([500.0]), torch.randn(1, 3, DIT.text_dim))
    assert out.dtype == torch.float32 and out.shape == (1, 16, 1, 4, 4)


def test_empty_and_misaligned_tensors(tmp_path: Path) -> None:
    state = {"bytes": torch.arange(3, dtype=torch.uint8), "odd": torch.arange(5.0), "none": torch.zeros(0, 4)}
    blob, header, end = b"", {}, 0
    for name, value in state.items():
        raw = value.numpy().tobytes()
        code = {"bytes": "U8"}.get(name, "F32")
        header[name] = {"dtype": code, "shape": list(value.shape), "data_offsets": [end, end + len(raw)]}
        blob, end = blob + raw, end + len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the values begin aligned, so the second tensor is not
    (tmp_path / "odd.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + blob)
    checkpoint = open_checkpoint(tmp_path / "odd.safetensors")
    assert all(torch.equal(checkpoint.read(n), t) for n, t in state.items())
    assert checkpoint.read("odd").data_ptr() % 4 == 0


def test_what_we_write_the_library_reads(tmp_path: Path) -> None:
    m = model("dit")
    odd = {"empty": torch.zeros(0, 3), "bytes": torch.arange(5, dtype=torch.uint8), "one": torch.tensor(2.0)}
    state = {**m.official, **odd}
    write_safetensors(state, tmp_path / "x.safetensors", {"a": "b"})
    assert same_bits(safetensors.torch.load_file(tmp_path / "x.safetensors"), state)
    header = json.loads((tmp_path / "x.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}")
    begins = {n: header[n]["data_offsets"][0] for n in state}
    assert not any(begins[n] % t.element_size() for n, t in state.items())  # so that reading copies nothing
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]  # no temporary file is left


# ------------------------------------------------------------------------------------------------------------ tokenizer


def test_the_tokenizer_is_embedded_given_or_found(tmp_path: Path) -> None:
    m = model("text")
    bare = official_file(m, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*without its tokenizer.*spiece\.model"):
        load_text_encoder(bare)
    tokenizer = tokenizer_file(tmp_path)
    for option in (tokenizer, tokenizer.parent):
        assert load_text_encoder(bare, tokenizer=option).tokenizer.proto == spiece()
    save(load_text_encoder(bare, tokenizer=tokenizer), tmp_path / "with.safetensors")
    assert load_text_encoder(tmp_path / "with.safetensors").tokenizer.proto == spiece()
    spiece_file = tmp_path / "google" / "umt5-xxl" / "spiece.model"
    spiece_file.parent.mkdir(parents=True)
    spiece_file.write_bytes(spiece())
    assert load_text_encoder(bare).tokenizer.proto == spiece()
    spiece_file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match="tokenizer cannot be used"):
        load_text_encoder(bare)


def test_the_tokenizer_of_a_diffusers_release(tmp_path: Path) -> None:
    for name in ("text_encoder", "tokenizer"):
        (tmp_path / name).mkdir()
    (tmp_path / "tokenizer" / "spiece.model").write_bytes(spiece())
    assert load_text_encoder(foreign_folder(model("text"), tmp_path / "text_encoder")).tokenizer.proto == spiece()


# ---------------------------------------------------------------------------------------------------- wrong and damaged


# -------------------------------------------------------------------------------------------------------------- folders


def test_missing_shards_are_named(tmp_path: Path) -> None:
    index = official_index(model("dit"), tmp_path)
    second = tmp_path / "diffusion_pytorch_model-00002-of-00003.safetensors"
    second.unlink()
    for source in (index, tmp_path):
        assert second.name in refusal(source)
    index.unlink()
    assert second.name in refusal(tmp_path)


def test_an_index_must_match_its_shards(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    index = official_index(model("dit"), tmp_path / "here")
    write_safetensors({"new.weight": torch.zeros(1)}, tmp_path / "secret.safetensors", {})
    good = json.loads(index.read_text())["weight_map"]
    first = next(iter(good.values()))
    for bad, message in (
        ({**good, "new.weight": first}, "new.weight"),
        ({**good, "new.weight": "../secret.safetensors"}, "not a file beside it"),
        ({**good, "new.weight": str(tmp_path / "secret.safetensors")}, "not a file beside it"),
        ({}, "weight_map"),
        ({"a": 3}, "weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": bad}))
        assert message in refusal(index)
    index.write_text("{")
    assert "JSON" in refusal(index)


def release(folder: Path, *paths: str) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    return folder


T5, VAE_FILE, SPIECE = "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth", "google/umt5-xxl/spiece.model"
INDEX = "diffusion_pytorch_model.safetensors.index.json"
RELEASES = {
    "official A14B": (
        (f"high_noise_model/{INDEX}", f"low_noise_model/{INDEX}", T5, VAE_FILE, SPIECE),
        ("high_noise_model", "low_noise_model", T5, VAE_FILE, SPIECE),
    ),
    "official 5B": ((INDEX, T5, "Wan2.2_VAE.pth", SPIECE), (INDEX, None, T5, "Wan2.2_VAE.pth", SPIECE)),
    "diffusers A14B": (
        (f"transformer/{INDEX}", f"transformer_2/{INDEX}", "vae/x", "text_encoder/x", "tokenizer/spiece.model"),
        ("transformer", "transformer_2", "text_encoder", "vae", "tokenizer/spiece.model"),
    ),
    "diffusers 5B": ((f"transformer/{INDEX}", "vae/x"), ("transformer", None, None, "vae", None)),
}


@pytest.mark.parametrize("name", RELEASES)
def test_releases_are_taken_apart(name: str, tmp_path: Path) -> None:
    files, wanted = RELEASES[name]
    parts = find_parts(release(tmp_path, *files))
    keys = ("high", "low", "text_encoder", "vae", "tokenizer")
    assert parts == {key: tmp_path / path for key, path in zip(keys, wanted, strict=True) if path}
    message = refusal(tmp_path)
    assert "whole release" in message and all(path in message for path in wanted if path)
