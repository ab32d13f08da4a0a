"""Packed matrices are read by threads, part by part, and are summed and encoded where that is fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gguf_files import matrices, write
from tests.int8_files import FORMATS, HOLD, NAMES, SMALL, stored
from tests.pipeline.test_host_planning import mappings
from wan_core.checkpoint import load_dit, load_text_encoder, open_checkpoint, staged
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.merge import Merge
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.opened import from_state_dict
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.checkpoint.staged import Reading
from wan_core.models.wan.model import WanModel
from wan_core.ops.kernels.formats import FP8, quantize_reference
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.loras import Wanted, merging
from wan_core.pipeline.sources import TINY

CPU, META = torch.device("cpu"), torch.device("meta")
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
WAYS = {
    "whole": None,
    "packed": HOLD,
    "int8": Quantization(Int8Linear, CPU),
    "fp8": Quantization(Fp8RowLinear, CPU, as_stored=True),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, paths = tmp_path_factory.mktemp("int8"), {}
    for kind in FORMATS:
        state, _, notes = stored(kind)
        write_safetensors(state, paths.setdefault(kind, folder / f"{kind}.safetensors"), notes)
    state = random_module(SMALL, device="cpu", dtype=torch.float32).state_dict()
    notes = {"num_heads": 2, "text_len": 32, "comfy.gguf.orig_shape.patch_embedding.weight": [256, 16, 1, 2, 2]}
    write(paths.setdefault("Q4_K", folder / "m.gguf"), state, matrices("Q4_K"), notes=notes)
    return paths


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded text encoder with every linear in FP8 with a scale, as ComfyUI's files of UMT5 have it."""
    encoder = load_text_encoder(TINY / "text_encoder.safetensors")
    path, state = tmp_path_factory.mktemp("scaled") / "scaled.safetensors", {}
    for name, value in encoder.encoder.state_dict().items():
        state[name] = value
        if value.ndim == 2 and "embedding" not in name:
            state[name], state[name.replace(".weight", ".scale_weight")] = quantize_reference(value, "tensor")
    source = open_checkpoint(TINY / "text_encoder.safetensors")
    state["spiece_model"] = source.read("spiece_model")
    write_safetensors(state, path, dict(source.metadata))
    return path


@pytest.fixture(scope="module")
def lora() -> Wanted:
    """For every matrix but those of cross-attention."""
    draw, state, shapes = torch.Generator().manual_seed(7), {}, expected_shapes(SMALL)
    for name in (name for name in sorted(NAMES) if "cross_attn" not in name):
        n, k = shapes[f"{name}.weight"]
        state[f"diffusion_model.{name}.lora_up.weight"] = torch.randn(n, 4, generator=draw) * 0.1
        state[f"diffusion_model.{name}.lora_down.weight"] = torch.randn(4, k, generator=draw) * 0.1
    return Wanted(read_lora(from_state_dict(state, "a LoRA"), shapes), 1.0, ("", 0, 0))


def read(path: Path, quantization: Quantization | None, how: Reading, loras: Merge | None = None) -> WanModel:
    with patch.object(staged, "PIECE", 1000):
        return load_dit(path, dtype=torch.float32, quantization=quantization, loras=loras, how=how)


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.contiguous().view(torch.uint8) for name, value in model.state_dict().items() if value.ndim}


def views(model: WanModel, path: Path) -> int:
    """How many matrices of the blocks are views of the mapped file."""
    ranges = mappings(path)
    addresses = [model.get_parameter(f"{name}.weight").data_ptr() for name in NAMES]
    return sum(any(begin <= at < end for begin, end in ranges) for at in addresses)


@pytest.mark.parametrize("kind", ["tensor", "rotated 256", "w4a8", "Q4_K"])
@pytest.mark.parametrize(("way", "merged"), [(way, at % 2 == 1) for at, way in enumerate(WAYS)])
@NEEDS_PROC
def test_it_is_the_same_mapped_and_read(files, lora: Wanted, kind: str, way: str, merged: bool) -> None:
    """Threads read and count every byte: nothing comes from the mapped file, which one thread reads."""
    loras, seen = merging([lora], CPU) if merged else None, list[int]()
    mapped = bits(read(files[kind], WAYS[way], Reading(), loras))
    model = read(files[kind], WAYS[way], Reading(seen.append, mapped=False), loras)
    fed = bits(model)
    assert mapped.keys() == fed.keys() and all(torch.equal(value, fed[name]) for name, value in mapped.items())
    assert sum(seen) == sum(info.nbytes for info in open_checkpoint(files[kind]).tensors.values())
    assert not views(model, files[kind])


def test_a_text_encoder_is_read_so_too(scaled: Path) -> None:
    seen: list[int] = []
    whole = scaled.stat().st_size - open_checkpoint(scaled).tensors["spiece_model"].nbytes
    mapped, module = (
        load_text_encoder(scaled, dtype=torch.float32, quantization=HOLD, how=how).encoder
        for how in (Reading(), Reading(seen.append, mapped=False))
    )
    fed = bits(module)
    assert sum(value.dtype == FP8 for value in module.state_dict().values()) > 5
    assert all(torch.equal(value, fed[name]) for name, value in bits(mapped).items())
    assert 0.9 * whole < sum(seen) <= whole
    weight = module.blocks[0].ffn.fc1.weight
    assert weight.untyped_storage().nbytes() < scaled.stat().st_size // 4  # memory of its own, not a view


class OnTheCPU(TorchDispatchMode):
    """Collects the operations that make large matrices of floating-point numbers on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "cpu" and out.numel() > SMALL.dim**2:
            views = [a for a in args if isinstance(a, Tensor) and a.data_ptr() == out.data_ptr()]
            if out.dtype.is_floating_point and not views:
                self.found.append(str(func))
        return out


@pytest.mark.parametrize("way", ["int8", "fp8", "packed"])
def test_it_is_all_computed_where_weights_are_encoded(files, lora: Wanted, way: str) -> None:
    """The device `meta` stands for a GPU: what has arrived there cannot come back, as sums of packed weights did."""
    quantization = replace(WAYS[way] or HOLD, device=META)
    with OnTheCPU() as there:
        model = load_dit(
            files["rotated 64"],
            device=META,
            dtype=torch.float32,
            quantization=quantization,
            loras=merging([lora], META),
        )
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not there.found
