"""GGUF files, INT8 files and FP8 files with scales in a running ComfyUI: listed, recognised, held as they are, and true
to the caption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.comfyui import ComfyUI, Graph
from tests.gguf_files import llama_name, matrices, tokenizer_notes, write
from tests.nodes.comfy_files import LOOK, assert_comes_true, facts_of, looked_at
from tools.embedded_graphs import node, text_to_video
from wan_core.checkpoint import load_dit, load_text_encoder
from wan_core.checkpoint.save import save, write_safetensors
from wan_core.ops.kernels.formats import quantize_reference
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.sources import TINY

pytestmark = pytest.mark.comfy


INT8 = Quantization(Int8Linear, torch.device("cpu"))


def make_files(models: Path) -> None:
    for name in ("high", "low"):
        model = load_dit(TINY / f"t2v_{name}.safetensors", dtype=torch.float32)
        notes = {key: getattr(model.config, key) for key in ("num_heads", "text_len", "eps")}
        state = model.state_dict()
        write(models / "diffusion_models" / f"{name}-Q8_0.gguf", state, matrices("Q8_0"), notes=notes)
        scaled: dict[str, Tensor] = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}
        linears = model.config.quantized_names()
        for key, value in state.items():
            linear, _, last = key.rpartition(".")
            if last == "weight" and linear in linears:
                scaled[key], scaled[f"{linear}.scale_weight"] = quantize_reference(value, "tensor")
                scaled[f"{linear}.scale_input"] = torch.tensor(1.0)
            else:
                scaled[key] = value.half()
        int8 = load_dit(TINY / f"t2v_{name}.safetensors", dtype=torch.float32, quantization=INT8)
        save(int8, models / "diffusion_models" / f"{name}_int8_convrot.safetensors")
        metadata = {key: str(value) for key, value in notes.items()}
        write_safetensors(scaled, models / "diffusion_models" / f"{name}_fp8_scaled.safetensors", metadata)
    encoder = load_text_encoder(TINY / "text_encoder.safetensors", dtype=torch.float32)
    write(
        models / "text_encoders" / "text-Q8_0.gguf",
        encoder.encoder.state_dict(),
        lambda name, value: "Q8_0" if value.ndim == 2 and "pos_embedding" not in name else "F32",
        arch="t5encoder",
        notes=tokenizer_notes(encoder.tokenizer.proto),
        rename=llama_name,
    )


PACKS = {"look": LOOK}


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    make_files(base / "models")


def with_files(kind: str, **inputs: str) -> Graph:
    graph = looked_at(text_to_video())
    graph["model"]["inputs"] |= {part: f"{part}{kind}" for part in ("high", "low")} | inputs
    return graph


def test_gguf_files_of_both_experts_and_the_text_encoder(comfy: ComfyUI) -> None:
    graph = with_files("-Q8_0.gguf")
    graph["encoder"]["inputs"]["text_encoder"] = "text-Q8_0.gguf"
    graph |= {"report": node("WanCoreReport", report=["decode", 1])}
    run = comfy.run(graph)
    facts = facts_of(run)
    assert_comes_true(comfy.output_file(run, "save"))
    assert "Q8_0" in run.outputs["model"]["text"][0] and "as they are stored" in run.outputs["model"]["text"][0]
    assert facts["told"] == facts["loaded"] == facts["bytes"]
    assert facts["units"] == pytest.approx(facts["bytes"], abs=100)  # by which it is decided how many blocks fit
    matrices = 2 * 8 * (8 * 128 * 128 + 2 * 128 * 384)
    assert facts["bytes"] < 4 * matrices, "in float32 they would be more"
    text = comfy.get("/object_info/WanCoreTextEncoderLoader")["WanCoreTextEncoderLoader"]
    assert "text-Q8_0.gguf" in str(text)


def test_gguf_encoded_as_fp8(comfy: ComfyUI) -> None:
    run = comfy.run(with_files("-Q8_0.gguf", precision="fp8"))
    assert facts_of(run)["fp8"] == 2 * 8 * (8 * 128 * 128 + 2 * 128 * 384)
    assert_comes_true(comfy.output_file(run, "save"))


def test_fp8_files_with_scales(comfy: ComfyUI) -> None:
    run = comfy.run(with_files("_fp8_scaled.safetensors", precision="fp8-tensor"))
    assert facts_of(run)["fp8"] == 2 * 8 * (8 * 128 * 128 + 2 * 128 * 384)
    assert_comes_true(comfy.output_file(run, "save"))


def test_int8_files(comfy: ComfyUI) -> None:
    run = comfy.run(with_files("_int8_convrot.safetensors"))
    facts, told = facts_of(run), run.outputs["model"]["text"][0]
    assert_comes_true(comfy.output_file(run, "save"))
    assert "int8_tensorwise convrot64" in told and "as they are stored (INT8 as stored, in plain torch)" in told
    assert facts["told"] == facts["loaded"] == facts["bytes"] < 4 * 2 * 8 * (8 * 128 * 128 + 2 * 128 * 384)
