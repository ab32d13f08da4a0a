"""GGUF files: every format's numbers, the reader, transformers and text encoders, and what is done with them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.gguf_files import llama_name, matrices, random_rows, tokenizer_notes, write
from wan_core.checkpoint import CheckpointError, detect, load_dit, load_text_encoder, open_checkpoint
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.config import LoadOptions, LoraOptions, Request
from wan_core.execution.optimize import compile_blocks
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.kernels.gguf_blocks import FORMATS, unpack, unpack_reference
from wan_core.ops.quant.packed import PackedEmbedding, PackedLinear
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY

CPU = torch.device("cpu")
HOLD = Quantization(PackedLinear, CPU)
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=256, ffn_dim=512, num_heads=2, num_layers=2, text_dim=48, text_len=32
)
NOTES = {"num_heads": 2, "text_len": 32}
NAMES = SMALL.quantized_names()


def plain() -> dict[str, Tensor]:
    return random_module(SMALL, device=CPU, dtype=torch.float32, seed=1).state_dict()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 16, 2, 8, 8, generator=generator)
    return x, torch.tensor([500.0]), torch.randn(1, 4, 48, generator=generator)


# -------------------------------------------------------------------------------------------------------------- numbers


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9), blocks=st.integers(1, 3))
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_equal_the_packages_bit_for_bit(name: str, seed: int, rows: int, blocks: int) -> None:
    """Over any bytes at all: infinite scales and NaN too."""
    data = np.random.default_rng(seed).integers(0, 256, (rows, blocks * FORMATS[name].bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, Kind[name])
    for unpacked in (
        unpack_reference(torch.from_numpy(data), name),
        unpack(torch.from_numpy(data), name, torch.float32),
    ):
        assert unpacked.shape == expected.shape
        both = (unpacked.numpy() == expected) | (np.isnan(unpacked.numpy()) & np.isnan(expected))
        assert both.all() and np.array_equal(
            np.signbit(unpacked.numpy()) | np.isnan(expected), np.signbit(expected) | np.isnan(expected)
        )


# --------------------------------------------------------------------------------------------------------------- reader


def test_the_reader_agrees_with_the_packages(tmp_path: Path) -> None:
    kinds = iter([*FORMATS, *FORMATS])

    def choose(name: str, value: Tensor) -> str:
        return next(kinds) if value.ndim == 2 and value.shape[-1] == 256 and "blocks" in name else "BF16"

    write(tmp_path / "m.gguf", plain(), choose)
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    ours = open_checkpoint(tmp_path / "m.gguf")
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        info, numbers = ours.tensors[tensor.name], gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert info.nbytes == tensor.n_bytes and list(reversed(tensor.shape.tolist())) == list(info.shape)
        assert (info.packing is not None) == (tensor.tensor_type.name in FORMATS)
        read = ours.read(tensor.name)
        assert read.dtype == info.dtype and torch.equal(read.float(), torch.from_numpy(numbers).reshape(info.shape))
    assert ours.metadata["general.architecture"] == "wan"


def test_nothing_is_copied(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", plain(), matrices("Q4_K"), notes=NOTES)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    before = checkpoint.read_packed("blocks.0.ffn.0.weight").parts["weight"]
    again = checkpoint.read_packed("blocks.0.ffn.0.weight").parts["weight"]
    assert before.data_ptr() == again.data_ptr()
    model = load_dit(checkpoint, quantization=HOLD, dtype=torch.float32)
    assert model.blocks[0].ffn[0].weight.data_ptr() == before.data_ptr()


def test_shapes_that_ggml_cannot_hold_come_back(tmp_path: Path) -> None:
    """Leading axes of one are dropped by its tools; more than four axes are noted beside the tensor."""
    state = plain()
    flat = {n: v.squeeze(0) if n.endswith("modulation") else v for n, v in state.items()}
    shape = list(state["patch_embedding.weight"].shape)
    flat["patch_embedding.weight"] = state["patch_embedding.weight"].flatten(1)
    notes = NOTES | {"comfy.gguf.orig_shape.patch_embedding.weight": shape}
    write(tmp_path / "m.gguf", flat, matrices("Q8_0"), notes=notes)
    loaded = load_dit(tmp_path / "m.gguf", dtype=torch.float32).state_dict()
    for name in ("patch_embedding.weight", "blocks.1.modulation", "head.modulation"):
        assert torch.equal(loaded[name], state[name])


# ---------------------------------------------------------------------------------------------------------- transformer


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_a_transformer_in_every_format(name: str, tmp_path: Path) -> None:
    meant = write(tmp_path / "m.gguf", plain(), matrices(name), notes=NOTES)
    wide = load_dit(tmp_path / "m.gguf", dtype=torch.float32)
    assert all(torch.equal(value, meant[n]) for n, value in wide.state_dict().items())
    packed = load_dit(tmp_path / "m.gguf", dtype=torch.float32, quantization=HOLD)
    assert {n for n, m in packed.named_modules() if isinstance(m, PackedLinear)} == NAMES
    assert torch.equal(packed(*inputs()), wide(*inputs()))
    half = load_dit(tmp_path / "m.gguf", dtype=torch.bfloat16, quantization=HOLD)(*inputs())
    assert torch.equal(half, load_dit(tmp_path / "m.gguf", dtype=torch.bfloat16)(*inputs()))


@torch.no_grad()
def test_formats_may_be_mixed_and_the_rest_may_be_packed_too(tmp_path: Path) -> None:
    """The "_M" files mix formats; others pack every tensor. Both load."""

    def choose(name: str, value: Tensor) -> str:
        if value.ndim != 2:
            return "F16" if value.ndim == 1 else "F32"
        if name.startswith("blocks."):
            return "Q6_K" if ".v." in name else "BF16" if ".norm" in name or ".o." in name else "Q4_K"
        return "Q8_0" if value.shape[-1] % 32 == 0 else "F16"

    meant = write(tmp_path / "m.gguf", plain(), choose, notes=NOTES)
    model = load_dit(tmp_path / "m.gguf", dtype=torch.float32, quantization=HOLD)
    packings = {n: m.packing for n, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert set(packings) == {n for n in NAMES if not n.endswith(".o")} and packings["blocks.1.self_attn.v"] == "Q6_K"
    wide = load_dit(tmp_path / "m.gguf", dtype=torch.float32)
    assert all(torch.equal(value, meant[n]) for n, value in wide.state_dict().items())
    assert torch.equal(model(*inputs()), wide(*inputs()))


@torch.no_grad()
def test_it_compiles_as_one_graph_and_the_bytes_can_move(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", plain(), matrices("Q4_K"), notes=NOTES)
    model = load_dit(tmp_path / "m.gguf", dtype=torch.float32, quantization=HOLD)
    expected = model(*inputs())
    moved = {n: p.data.clone() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = moved[name]  # as swapping does it
    assert torch.equal(model(*inputs()), expected)
    compile_blocks(model, CPU, backend="aot_eager")
    assert torch.allclose(model(*inputs()), expected, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- text encoder


def tiny_text(path: Path, fmt: str = "Q8_0") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The embedded text encoder as a GGUF file: (its own weights, those of the file)."""
    encoder = load_text_encoder(TINY / "text_encoder.safetensors", dtype=torch.float32)
    state = dict(encoder.encoder.state_dict())

    def choose(name: str, value: Tensor) -> str:
        return fmt if value.ndim == 2 and "pos_embedding" not in name else "F32"

    notes = tokenizer_notes(encoder.tokenizer.proto)
    return state, write(path, state, choose, arch="t5encoder", notes=notes, rename=llama_name)


@torch.no_grad()
def test_a_text_encoder_with_its_tokenizer(tmp_path: Path) -> None:
    own, meant = tiny_text(tmp_path / "t.gguf")
    assert detect(tmp_path / "t.gguf", "text_encoder").layout == "llama.cpp"
    wide = load_text_encoder(tmp_path / "t.gguf", dtype=torch.float32)
    assert all(torch.equal(value, meant[n]) for n, value in wide.encoder.state_dict().items())
    assert own.keys() == meant.keys()
    packed = load_text_encoder(tmp_path / "t.gguf", dtype=torch.float32, quantization=HOLD)
    assert isinstance(packed.encoder.token_embedding, PackedEmbedding)
    linears = [m for m in packed.encoder.modules() if isinstance(m, nn.Linear | PackedLinear)]
    assert all(isinstance(m, PackedLinear) for m in linears) and linears
    prompts = ["a red circle moving right on a blue background", "", "A GREEN  Cross … on ½ #&amp; ﬁ"]
    original = load_text_encoder(TINY / "text_encoder.safetensors", dtype=torch.float32)
    for prompt in prompts:
        ids = original.tokenizer.encode(prompt)
        assert packed.tokenizer.encode(prompt)[: len(ids) - 1] == ids[:-1]
    assert torch.equal(packed.encode(prompts), wide.encode(prompts))
    rows, expected = packed.encode(prompts[:1]), original.encode(prompts[:1])
    assert float((rows - expected).norm() / expected.norm()) < 0.02


# ------------------------------------------------------------------------------------------------------ a whole request


@pytest.mark.slow
def test_a_video_from_gguf_files(tmp_path: Path) -> None:
    """Both experts and the text encoder: nearly the video of the plain files, from less memory."""
    for name in ("high", "low"):
        model = load_dit(TINY / f"t2v_{name}.safetensors", dtype=torch.float32)
        notes = {"num_heads": model.config.num_heads, "text_len": model.config.text_len, "eps": model.config.eps}
        write(tmp_path / f"{name}.gguf", model.state_dict(), matrices("Q8_0"), notes=notes)
    tiny_text(tmp_path / "text.gguf")
    request = Request(prompt="a red circle moving right", steps=4, seed=3, width=48, height=48, frames=5)
    files = {part: str(tmp_path / f"{part}.gguf") for part in ("high", "low")}
    files |= {"text_encoder": str(tmp_path / "text.gguf"), "vae": str(TINY / "vae.safetensors")}
    pipe = Pipeline.load(LoadOptions(task="t2v-tiny", device="cpu", **files))
    assert isinstance(pipe.models.expert("low").blocks[0].ffn[0], PackedLinear)
    assert "packed as Q8_0" in str(pipe.report.settings["precision"]["high"])
    frames = pipe.generate(request).frames.astype(np.float32)
    expected = Pipeline.load(LoadOptions(model="tiny", device="cpu")).generate(request).frames.astype(np.float32)
    assert np.square(frames - expected).mean() < 80  # 29 dB of 8-bit frames


# -------------------------------------------------------------------------------------------------------------- refusal


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as fault:
        load_dit(path)
    return str(fault.value)


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, plain(), matrices("Q8_0"), notes=NOTES)
    content = path.read_bytes()
    name = b"blocks.0.ffn.0.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    coarse = content[:at] + (16).to_bytes(4, "little") + content[at + 4 :]
    cases = {
        "IQ2_XXS": coarse,
        "version 1": content[:4] + (1).to_bytes(4, "little") + content[8:],
        "big-endian": content[:4] + (3).to_bytes(4, "big") + content[8:],
        "truncated": content[: len(content) - 3000],
    }
    for message, damaged in cases.items():
        path.write_bytes(damaged)
        assert message in refusal(path)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="transformer"):
        load_text_encoder(path)


# ---------------------------------------------------------------------------------------------------------------- LoRAs


@pytest.mark.parametrize("mode", ["attach", "merge"])
@torch.no_grad()
def test_a_lora_on_packed_weights(tmp_path: Path, mode: str) -> None:
    """Attached, the bytes stay as they are; merged, the matrices that it changes are widened and the others stay."""
    model = load_dit(TINY / "t2v_high.safetensors", dtype=torch.float32)
    notes = {"num_heads": model.config.num_heads, "text_len": model.config.text_len, "eps": model.config.eps}
    meant = write(tmp_path / "m.gguf", model.state_dict(), matrices("Q8_0"), notes=notes)
    name, generator = "blocks.2.ffn.0", torch.Generator().manual_seed(1)
    n, k = meant[f"{name}.weight"].shape
    up, down = torch.randn(n, 4, generator=generator) * 0.2, torch.randn(4, k, generator=generator) * 0.2
    pair = {f"diffusion_model.{name}.lora_{which}.weight": value for which, value in (("A", down), ("B", up))}
    write_safetensors(pair, tmp_path / "lora.safetensors", {})
    options = LoadOptions(
        task="t2v-tiny", high=str(tmp_path / "m.gguf"), low=str(tmp_path / "m.gguf"), device="cpu",
        text_encoder=str(TINY / "text_encoder.safetensors"), vae=str(TINY / "vae.safetensors"),
        loras=(LoraOptions(path=str(tmp_path / "lora.safetensors"), strength=0.5),), lora_mode=mode,
    )  # fmt: skip
    loaded = Pipeline.load(options).models.expert("high")
    packed = {key for key, m in loaded.named_modules() if isinstance(m, PackedLinear)}
    assert packed == model.config.quantized_names() - ({name} if mode == "merge" else set())
    meant[f"{name}.weight"] += 0.5 * up @ down
    model.load_state_dict(meant)
    generator = torch.Generator().manual_seed(2)
    x, text = torch.randn(1, 16, 2, 8, 8, generator=generator), torch.randn(1, 4, 64, generator=generator)
    output, expected = (one(x, torch.tensor([500.0]), text) for one in (loaded, model))
    assert float((output - expected).norm() / expected.norm()) < 1e-5


def test_a_table_in_every_format() -> None:
    ids = torch.tensor([[3, 0], [7, 7]])
    for name in FORMATS:
        data = torch.from_numpy(random_rows(name, 9, 512))
        from wan_core.ops.quant.packed import Packed

        table = PackedEmbedding(torch.float32, Packed(name, (9, 512), {"weight": data}))
        table.load_state_dict({"weight": data}, assign=True)
        assert torch.equal(table(ids), unpack_reference(data, name)[ids])
