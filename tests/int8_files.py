"""Files with INT8, 4-bit, NVFP4 and MXFP8 matrices, as ComfyUI writes them, for tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comfyui import find_comfyui, python_of
from wan_core.checkpoint.random import random_module
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.kernels.formats import FP8, quantize_reference
from wan_core.ops.kernels.integer_weights import (
    IntegerFormat,
    encode_int8,
    rotate,
)
from wan_core.ops.quant.mx import encode_mxfp8, encode_nvfp4
from wan_core.ops.quant.packed import PackedLinear, unpack
from wan_core.ops.quant.swap import Quantization

CPU = torch.device("cpu")
HOLD = Quantization(PackedLinear, CPU)
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=256, ffn_dim=512, num_heads=2, num_layers=2, text_dim=48, text_len=32
)
NOTES = {"num_heads": "2", "text_len": "32"}
NAMES = SMALL.quantized_names()
FORMATS = {
    "tensor": IntegerFormat("int8_tensorwise"),
    "rows": IntegerFormat("int8_tensorwise"),
    **{f"rotated {size}": IntegerFormat("int8_tensorwise", size) for size in (4, 16, 64, 256)},
    "w4a4": IntegerFormat("convrot_w4a4", 256, int4=True),
    "w4a8": IntegerFormat("asym_w4a8_int8", 256, 16),
    "w4a8 plain": IntegerFormat("asym_w4a8_int8", 64, 32),
}


def nibbles(codes: Tensor) -> Tensor:
    """Two to a byte, the first in the low half."""
    return (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)


MICROSCALED = {"nvfp4": encode_nvfp4, "mxfp8": encode_mxfp8}


def text_of(kind: str) -> str:
    """`Packed.fmt`."""
    return kind if kind in MICROSCALED else FORMATS[kind].text


def encoded(kind: str, weight: Tensor) -> dict[str, Tensor]:
    """The parts of a matrix as a file stores them; by the nearest number, which is all that a reader needs."""
    if kind in MICROSCALED:
        return dict(zip(("weight", "weight_scale", "weight_scale_2"), MICROSCALED[kind](weight), strict=False))
    fmt = FORMATS[kind]
    rotated = rotate(weight.float(), fmt.rotation)
    if fmt.name == "int8_tensorwise":
        if kind != "tensor":
            return encode_int8(weight, fmt.rotation)
        scale = rotated.abs().amax() / 127
        return {"weight": (rotated / scale).round().to(torch.int8), "weight_scale": scale}
    if fmt.name == "convrot_w4a4":
        scale = rotated.abs().amax(1) / 7
        return {"weight": nibbles((rotated / scale[:, None]).round().int()), "weight_scale": scale}
    channel = rotated.abs().amax(1) / 127
    groups = (rotated / channel[:, None]).unflatten(1, (-1, fmt.group))
    book = None if kind.endswith("plain") else torch.linspace(-1, 1, 16)
    largest = 7.0 if book is None else 1.0
    relative = (groups.abs().amax(-1) / largest).to(FP8)
    values = (groups / relative.float()[..., None].clamp(min=1e-6)).flatten(1)
    if book is None:
        codes = values.round().clamp(-8, 7).int() + 8
        return {"weight": nibbles(codes), "weight_s_rel": relative, "weight_s_channel": channel}
    codes = (values[..., None] - book).abs().argmin(-1).int()
    return {"weight": nibbles(codes), "weight_s_rel": relative, "weight_s_channel": channel, "weight_codebook": book}


def described(kind: str, nested: bool = False) -> dict[str, Any]:
    if kind in MICROSCALED:
        return {"format": kind}
    fmt, params = FORMATS[kind], dict[str, Any]()
    if fmt.rotation:
        params |= {"convrot_groupsize": fmt.rotation}
        params |= {"convrot": True} if fmt.name == "int8_tensorwise" else {}
    if fmt.group:
        params["group_size"] = fmt.group
    return {"format": fmt.name, **({"params": params} if nested else params)}


def stored(
    kind: str, spelling: str = "tensor", config: DiTConfig = SMALL, mixed: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """(the file's tensors, the numbers that they mean, the file's notes). spelling: tensor, params, metadata, or the
    names of formats alone (words). mixed: one linear of a block in FP8, one in bf16."""
    state, meant, layers, names = {}, {}, {}, config.quantized_names()
    for name, value in random_module(config, device=CPU, dtype=torch.bfloat16, seed=1).state_dict().items():
        linear = name.rpartition(".")[0]
        if linear not in names or not name.endswith(".weight") or (mixed and linear.endswith(".k")):
            state[name], meant[name] = value, value.float()
            continue
        if mixed and linear.endswith("ffn.0"):
            data, scale = quantize_reference(value, "tensor")
            parts, layers[linear] = {"weight": data, "weight_scale": scale}, {"format": "float8_e4m3fn"}
            meant[name] = data.float() * scale
        else:
            parts, layers[linear] = encoded(kind, value), described(kind, spelling == "params")
            meant[name] = unpack(text_of(kind), parts, torch.float32)
            if kind == "nvfp4":
                parts["weight_scale"] = parts["weight_scale"].view(FP8)
            if kind in MICROSCALED:
                parts["input_scale"] = torch.tensor(1.0)
        state |= {f"{linear}.{part}": tensor for part, tensor in parts.items()}
        if spelling in ("tensor", "params"):
            text = json.dumps(layers[linear]).encode()
            state[f"{linear}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    noted = {name: entry["format"] if spelling == "words" else entry for name, entry in layers.items()}
    notes = {} if spelling in ("tensor", "params") else {"_quantization_metadata": json.dumps({"layers": noted})}
    return state, meant, NOTES | notes


def inputs(config: DiTConfig = SMALL) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 16, 2, 8, 8, generator=generator)
    return x, torch.tensor([500.0]), torch.randn(1, config.text_len, config.text_dim, generator=generator)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def run_there(source: str, *arguments: Path | str) -> str:
    """`source` in ComfyUI's Python, with its sources to import; its output. Skips where it has no comfy-kitchen."""
    checkout = find_comfyui()
    begin = f"import sys; sys.path.insert(0, {str(checkout)!r})\n"
    command = [python_of(checkout), "-c", begin + source, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named 'comfy_kitchen'" in done.stderr or "cannot import name 'AsymW4A8Int8Layout'" in done.stderr:
        pytest.skip("this ComfyUI has no comfy-kitchen with these formats")
    assert done.returncode == 0, done.stderr
    return done.stdout
