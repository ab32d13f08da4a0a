"""Models with random weights, created on the device: for benchmarks of speed and memory without files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from wan_core.checkpoint.detect import Config, empty_module
from wan_core.checkpoint.lora.merge import Merge
from wan_core.checkpoint.staged import USUAL, Reading
from wan_core.models.text.umt5 import UMT5Encoder
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.quant.swap import Quantization, encoded_weight, swap_linears


@torch.no_grad()
def random_module(
    config: Config,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    quantization: Quantization | None = None,
    draw_on: torch.device | None = None,
    loras: Merge | None = None,
    how: Reading = USUAL,
) -> nn.Module:
    """The module that `config` describes, in eval mode, with random values on `device` that depend only on the seed.

    Matrices preserve the variance of their input, so that activations stay finite through all layers; norms are one.
    draw_on: the device where values are drawn, one at a time; None: `device`. quantization (transformers only) encodes
    every matrix as soon as it is drawn; `loras` are merged before that. how: which blocks are made.
    """
    module, device = empty_module(config), torch.device(device)
    values: Iterable[tuple[str, Tensor]] = _draw(module, draw_on or device, dtype, seed)
    names: frozenset[str] = frozenset()
    if quantization is not None:
        assert isinstance(config, DiTConfig)
        names = config.quantized_names(quantization.keep_blocks)
    if loras is not None:
        values = loras.apply(values, names, [name for name, _ in module.named_parameters()])
    state: dict[str, Tensor] = {}
    for name, value in values:  # drawn before `swap_linears` changes the module
        linear, dot, parameter = name.rpartition(".")
        encoded = {parameter: value}
        if quantization is not None and linear in names and parameter == "weight":
            encoded = encoded_weight(value, quantization)
        if how.reads(name):
            state |= {f"{linear}{dot}{part}": tensor.to(device) for part, tensor in encoded.items()}
    if quantization is not None:
        swap_linears(module, quantization.kind, names, dtype)
    module.load_state_dict(state, assign=True, strict=how.layers is None)
    return module.requires_grad_(False).eval()


def _draw(module: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator(device).manual_seed(seed)
    for name, empty in module.named_parameters():
        value = torch.empty(empty.shape, dtype=dtype, device=device)
        if value.ndim == 1 or "modulation" in name or "gamma" in name:
            value.fill_(0.0 if name.endswith("bias") else 1.0)
            if "modulation" in name:
                value.normal_(std=value.shape[-1] ** -0.5, generator=generator)
        else:
            fan_in = value[0].numel() if "embedding.weight" not in name or value.ndim == 5 else 1
            value.normal_(std=fan_in**-0.5, generator=generator)
            if isinstance(module, UMT5Encoder) and name.endswith(".attn.q.weight"):
                value *= (module.config.dim_attn // module.config.num_heads) ** -0.5  # T5 divides nowhere else
        yield name, value
