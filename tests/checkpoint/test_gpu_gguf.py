"""Packed weights on an NVIDIA GPU: the kernel's numbers, and transformers that hold them."""

from __future__ import annotations

import pytest
import torch

from tests.gguf_files import matrices, write
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.random import random_module
from wan_core.execution.optimize import compilations, optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.gguf_blocks import FORMATS, unpack, unpack_reference
from wan_core.ops.quant import mx
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.mx import encode_mxfp8, encode_nvfp4
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.packed import unpack as unpack_any
from wan_core.ops.quant.swap import Quantization

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=512, ffn_dim=1280, num_heads=4, num_layers=3, text_dim=64, text_len=32
)
HELD = ("Q8_0", "Q4_K")


def equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (513, 20)])
def test_the_kernel_gives_the_references_numbers(name, dtype, rows, blocks):
    """Over any bytes, bit for bit; on the GPU and on the CPU."""
    generator = torch.Generator().manual_seed(rows)
    data = torch.randint(0, 256, (rows, blocks * FORMATS[name].bytes), generator=generator, dtype=torch.uint8)
    expected = unpack_reference(data, name, dtype)
    assert equal(unpack(data.to(CUDA), name, dtype).cpu(), expected)
    with fused.use("torch"):
        assert equal(unpack(data.to(CUDA), name, dtype).cpu(), expected)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_small_scales_on_the_gpu(fmt):
    x = torch.randn(160, 192, device=CUDA)
    encoded = encode_mxfp8(x) if fmt == "mxfp8" else encode_nvfp4(x)
    parts = dict(zip(("weight", "weight_scale", "weight_scale_2"), encoded, strict=False))
    unpacked = unpack_any(fmt, parts, torch.float32)
    expected = unpack_any(fmt, {name: part.cpu() for name, part in parts.items()}, torch.float32)
    assert torch.equal(unpacked.cpu(), expected)
    reason = mx.why_not_multiply(CUDA)
    if reason is not None:
        pytest.skip(reason)
    out = mx.multiply(torch.randn(77, 192, device=CUDA).bfloat16(), fmt, parts, None)
    assert out.shape == (77, 160) and out.isfinite().all()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    state = random_module(SMALL, device="cpu", dtype=torch.bfloat16, seed=1).state_dict()
    for fmt in HELD:
        write(folder / f"{fmt}.gguf", state, matrices(fmt), notes={"num_heads": 4, "text_len": 32})
    return folder


def inputs():
    generator = torch.Generator().manual_seed(3)
    x, text = torch.randn(1, 16, 5, 16, 16, generator=generator), torch.randn(1, 9, 64, generator=generator)
    return x.to(CUDA), torch.tensor([500.0], device=CUDA), text.to(CUDA, torch.bfloat16)


def load_packed(files, fmt, device=CUDA, kind=PackedLinear):
    quantization = Quantization(kind, CUDA)
    return load_dit(files / f"{fmt}.gguf", device=device, dtype=torch.bfloat16, quantization=quantization)


@pytest.mark.parametrize("fmt", HELD)
@torch.no_grad()
def test_a_transformer_is_that_of_the_widened_file(files, fmt):
    model, wide = load_packed(files, fmt), load_dit(files / f"{fmt}.gguf", device=CUDA, dtype=torch.bfloat16)
    assert any(isinstance(m, PackedLinear) for m in model.modules())
    expected = wide(*inputs()).float()
    assert float((model(*inputs()).float() - expected).norm() / expected.norm()) < 1e-3
    if torch.cuda.get_device_capability(CUDA) >= (8, 9):
        fp8 = load_packed(files, fmt, kind=Fp8RowLinear)(*inputs()).float()
        assert float((fp8 - expected).norm() / expected.norm()) < 0.1


@torch.no_grad()
def test_compiled_blocks_give_the_same(files):
    """Blocks compile once for all lengths."""
    attend = resolve_attention("sdpa", CUDA, torch.bfloat16, 128)[1]
    model = optimize(load_packed(files, "Q4_K"), attend=attend)
    expected = model(*inputs()).float()
    x, time, text = inputs()
    optimize(model, attend=attend, compile="blocks")
    before = compilations()
    output = model(*inputs()).float()
    assert float((output - expected).norm() / expected.norm()) < 5e-3
    once = compilations()
    model(x[:, :, :3, :12], time, text)
    assert once > before and compilations() == once


@torch.no_grad()
def test_widening_never_waits_for_the_device(files):
    model = load_packed(files, "Q8_0")
    arguments = inputs()
    model(*arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for linear in (m for m in model.modules() if isinstance(m, PackedLinear)):
            linear(torch.randn(5, linear.in_features, device=CUDA, dtype=torch.bfloat16))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [PackedLinear, Fp8RowLinear])
@torch.no_grad()
def test_weights_that_live_on_the_host_stay_there(files, kind):
    """Widened and encoded on the GPU, because that takes a second there and a minute on a CPU."""
    model = load_packed(files, "Q4_K", device="cpu", kind=kind)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    there = load_packed(files, "Q4_K", kind=kind)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), there.named_parameters(), strict=True):
        assert torch.equal(ours.view(torch.uint8).to(CUDA), theirs.view(torch.uint8)), name
