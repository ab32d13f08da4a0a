"""One model at one size, and the inputs of a forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from wan_core.checkpoint import load_dit
from wan_core.checkpoint.random import random_module
from wan_core.config import OptionError, check_size
from wan_core.models.wan.families import choose_task, find_task
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.sources import RANDOM, TINY


@dataclass
class Case:
    """One model at one size, and the inputs of a forward."""

    model: WanModel
    size: str
    tokens: int
    x: torch.Tensor
    timestep: torch.Tensor
    contexts: tuple[torch.Tensor, torch.Tensor]


def plain_model(
    name: str, device: torch.device, dtype: torch.dtype, layers: int | None, held: Quantization | None = None
) -> tuple[WanModel, int]:
    """The high-noise transformer, nothing applied to it, and the pixels per latent cell of its VAE.

    name: "random:TASK", "tiny" or a file. Random weights are the same on every call. held: how its linears are
    quantised. Raises OptionError.
    """
    if name.startswith("random:"):
        task = find_task(name.removeprefix("random:"))
        if task.name not in RANDOM:
            raise OptionError(f"random weights are made for {', '.join(RANDOM)}; for {task.name} use --model tiny")
        config, vae = RANDOM[task.name]
        config = replace(config, num_layers=layers or config.num_layers)
        model = random_module(config, device=device, dtype=dtype, seed=0, quantization=held)
        stride = vae.spatial_stride
    else:
        path = TINY / "t2v_high.safetensors" if name == "tiny" else name
        model = load_dit(path, device=device, dtype=dtype, quantization=held)
        stride = choose_task(model.config).task.vae.spatial_stride
        if layers is not None:
            del model.blocks[layers:]
    assert isinstance(model, WanModel)
    return model, stride


def parse_size(size: str) -> tuple[int, int, int]:
    """(width, height, frames) of WIDTHxHEIGHT[xFRAMES]; 81 frames if not said."""
    numbers = size.lower().split("x")
    if len(numbers) not in (2, 3) or not all(n.isdecimal() for n in numbers):
        raise OptionError(f"size {size!r} given; write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, for example 832x480x81")
    width, height, frames = (*map(int, numbers), 81)[:3]
    return width, height, frames


def make_case(model: WanModel, size: str, stride: int) -> Case:
    """Random inputs for WIDTHxHEIGHT[xFRAMES]. Raises OptionError for a size that the model cannot take."""
    width, height, frames = parse_size(size)
    check_size(width, height, frames, multiple=stride * model.config.patch_size[1])
    weight = model.patch_embedding.weight
    generator = torch.Generator().manual_seed(0)
    shape = (1, model.config.in_channels, (frames - 1) // 4 + 1, height // stride, width // stride)
    x = torch.randn(shape, generator=generator).to(weight.device)
    contexts = [torch.randn(1, n, model.config.text_dim, generator=generator).to(weight) for n in (24, 12)]
    tokens = shape[2] * shape[3] * shape[4] // 4
    timestep = torch.tensor([900.0], device=weight.device)
    return Case(model, f"{width}x{height}x{frames}", tokens, x, timestep, (contexts[0], contexts[1]))
