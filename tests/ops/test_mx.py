"""NVFP4 and MXFP8: their numbers, ComfyUI's files of them, and what holds them in memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.comfyui import find_comfyui, python_of
from tests.int8_files import encoded, stored
from wan_core.checkpoint import open_checkpoint
from wan_core.checkpoint.save import write_safetensors
from wan_core.cli import doctor
from wan_core.ops.quant import mx
from wan_core.ops.quant.mx import (
    E2M1,
    GROUP,
    decode_mxfp8,
    decode_nvfp4,
    encode_mxfp8,
    encode_nvfp4,
    tiled,
)
from wan_core.ops.quant.packed import Packed, PackedLinear, unpack

CPU = torch.device("cpu")
FORMATS = ("nvfp4", "mxfp8")


# -------------------------------------------------------------------------------------------------------------- numbers


def test_a_tile_as_the_library_draws_it() -> None:
    """cuBLAS: within 128 x 4, the scale of (row, column) is at (row % 32) * 16 + (row // 32) * 4 + column; the tiles of
    128 rows follow one another."""
    scales = torch.arange(256 * 8).remainder(256).to(torch.uint8).view(256, 8)
    stored = tiled(scales).flatten()
    for row in range(0, 256, 7):
        for column in range(8):
            tile = row // 128 * 2 + column // 4
            at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert stored[at] == scales[row, column]


@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 40), groups=st.integers(1, 5), seed=st.integers(0, 2**31), size=st.floats(-20, 20))
@pytest.mark.parametrize("fmt", FORMATS)
def test_encoding_rounds_to_the_nearest(fmt: str, rows: int, groups: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, groups * GROUP[fmt], generator=generator) * 2.0**size
    x[0] = 0
    unpacked = unpack(fmt, encoded(fmt, x), torch.float32)
    assert torch.equal(unpacked[0], torch.zeros_like(x[0]))
    # Half a step of the widest interval: E2M1 has a third of the largest number there, E4M3 a fourteenth.
    step = {"nvfp4": 1 / 6 + 1 / 15, "mxfp8": 1 / 14}[fmt]  # and E4M3's rounding of a scale
    largest = x.unflatten(1, (-1, GROUP[fmt])).abs().amax(-1, keepdim=True)
    assert ((unpacked - x).unflatten(1, (-1, GROUP[fmt])).abs() <= step * largest + 1e-6 * x.abs().max()).all()


def test_every_number_of_four_bits() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    data = ((codes << 4) | codes.flip(0))[None]  # the first number of a byte is in its high half
    one = tiled(torch.full((1, 2), 56, dtype=torch.uint8))  # E4M3 of one
    numbers = decode_nvfp4(data, one, torch.tensor(0.5))
    assert numbers[0, ::2].tolist() == [v / 2 for v in (*E2M1, *(-v for v in E2M1))]
    assert numbers[0, 1::2].tolist() == [v / 2 for v in (*(-v for v in reversed(E2M1)), *reversed(E2M1))]
    x = torch.tensor([*E2M1, *(-v for v in E2M1)])[None]
    again, scales, scale = encode_nvfp4(x)
    assert torch.equal(decode_nvfp4(again, scales, scale), x)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2])
    assert decode_nvfp4(*encode_nvfp4(ties))[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]  # to the even code


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_packed_matrix_reads_as_numbers(tmp_path: Path) -> None:
    state, meant, notes = stored("mxfp8")
    write_safetensors(state, tmp_path / "m.safetensors", notes)
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    assert torch.equal(checkpoint.read("blocks.0.ffn.0.weight"), meant["blocks.0.ffn.0.weight"])
    packed = checkpoint.read_packed("blocks.0.ffn.0.weight")
    assert isinstance(packed, Packed) and packed.nbytes == checkpoint.tensors["blocks.0.ffn.0.weight"].nbytes


# ------------------------------------------------------------------------------------------------------------- hardware


def test_what_multiplies_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Blackwell" in str(mx.why_not_multiply(CPU))
    report = doctor.examine("cpu")
    lines = [line for line in doctor.text(report).splitlines() if line.split()[0] in FORMATS]
    assert len(lines) == 2 and all("dequantised for each matmul" in line and "Blackwell" in line for line in lines)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (10, 0))
    monkeypatch.setattr(mx, "find_spec", lambda _: None)
    assert "comfy-kitchen" in str(mx.why_not_multiply(torch.device("cuda")))
    monkeypatch.setattr(mx, "find_spec", lambda name: name)
    assert mx.why_not_multiply(torch.device("cuda")) is None
    assert "untested on hardware" in doctor.packed_state({"usable": True, "error": 0.1})


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 37, 64])
def test_the_call_of_the_product(fmt: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's functions are stood in for by the same arithmetic in float32: what is handed over fits together."""

    def finished(product: Tensor, bias: Tensor | None, out_dtype: torch.dtype, **_: Tensor) -> Tensor:
        return (product if bias is None else product + bias).to(out_dtype)

    def quantize_nvfp4(x: Tensor, scale: Tensor, pad_16x: bool) -> tuple[Tensor, Tensor]:
        assert pad_16x or len(x) % 16 == 0
        x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 16))
        data, scales, own = encode_nvfp4(x)
        assert torch.allclose(own, scale)
        return data, scales

    def quantize_mxfp8(x: Tensor, pad_32x: bool) -> tuple[Tensor, Tensor]:
        assert pad_32x or len(x) % 32 == 0
        return encode_mxfp8(torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 32)))

    def scaled_mm_nvfp4(a: Tensor, b: Tensor, **options: Tensor) -> Tensor:
        left = decode_nvfp4(a, options["block_scale_a"], options["tensor_scale_a"])
        right = decode_nvfp4(b, options["block_scale_b"].view(torch.uint8), options["tensor_scale_b"])
        return finished(left @ right.t(), **options)

    def scaled_mm_mxfp8(a: Tensor, b: Tensor, own: Tensor, scales: Tensor, **options: Tensor) -> Tensor:
        assert scales.dtype == torch.float8_e8m0fnu
        product = decode_mxfp8(a, own) @ decode_mxfp8(b, scales.view(torch.uint8)).t()
        return finished(product, **options)

    import sys
    import types

    kitchen = types.ModuleType("comfy_kitchen")
    for function in (quantize_nvfp4, quantize_mxfp8, scaled_mm_nvfp4, scaled_mm_mxfp8):
        setattr(kitchen, function.__name__, function)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen)
    assert doctor.packed_self_test(fmt, CPU) < {"nvfp4": doctor.ROUNDED_FP4, "mxfp8": 0.06}[fmt]
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(48, 64, generator=generator), torch.randn(48, generator=generator)
    linear = PackedLinear(64, 48, True, torch.float32, Packed(fmt, (48, 64), encoded(fmt, weight)))
    linear.load_state_dict(encoded(fmt, weight) | {"bias": bias}, assign=True)
    linear.multiplies = True
    x = torch.randn(2, rows, 64, generator=generator)
    product, expected = linear(x), x @ weight.t() + bias
    assert product.shape == expected.shape
    assert float((product - expected).norm() / expected.norm()) < {"nvfp4": 0.2, "mxfp8": 0.06}[fmt]


WRITE = """
import sys, torch, comfy_kitchen as kitchen
from safetensors.torch import save_file
torch.manual_seed(0)
x = torch.randn(160, 192)
scale = x.abs().amax() / (448 * 6)
data, scales = kitchen.quantize_nvfp4(x, scale)
data8, scales8 = kitchen.quantize_mxfp8(x)
save_file({
    "a.weight": data, "a.weight_scale": scales, "a.weight_scale_2": scale, "a.x": x,
    "a.meant": kitchen.dequantize_nvfp4(data, scale, scales, torch.float32),
    "b.weight": data8, "b.weight_scale": scales8.view(torch.uint8),
    "b.meant": kitchen.dequantize_mxfp8(data8, scales8, torch.float32),
}, sys.argv[1], {"_quantization_metadata": '{"layers": {"a": {"format": "nvfp4"}, "b": {"format": "mxfp8"}}}'})
"""


@pytest.mark.comfy
def test_what_comfy_kitchen_writes(tmp_path: Path) -> None:
    """Its reading of its own tensors, and ours; and our encoding against its own."""
    python = python_of(find_comfyui())
    done = subprocess.run([python, "-c", WRITE, str(tmp_path / "k.safetensors")], capture_output=True, text=True)
    if "No module named 'comfy_kitchen'" in done.stderr:
        pytest.skip("this ComfyUI has no comfy-kitchen")
    assert done.returncode == 0, done.stderr
    checkpoint = open_checkpoint(tmp_path / "k.safetensors")
    x = checkpoint.read("a.x")
    for module, fmt in (("a", "nvfp4"), ("b", "mxfp8")):
        packed = checkpoint.read_packed(f"{module}.weight")
        assert packed.fmt == fmt and packed.shape == (160, 192)
        assert torch.equal(packed.dequantize(), checkpoint.read(f"{module}.meant"))
        ours = encoded(fmt, x)
        same = ours["weight"].view(torch.uint8) == packed.parts["weight"].view(torch.uint8)
        assert same.float().mean() > 0.999 and torch.equal(ours["weight_scale"], packed.parts["weight_scale"])
