"""Small LoRAs in their spellings, and the model that they are for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.loras_on import loras_on
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.load import StoredValues
from wan_core.checkpoint.lora.read import read_lora
from wan_core.config import LoadOptions, Request
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.linear import LowRank
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.loras import (
    Wanted,
    attachable,
)
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import PartToLoad, find_quantization
from wan_core.pipeline.sources import TINY, recognise

CPU = torch.device("cpu")

SOURCE = TINY / "t2v_high.safetensors"

RANK = 4


@cache
def base() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in load_dit(SOURCE, dtype=torch.float32).state_dict().items()}


@cache
def loaded(precision: str | None = None) -> WanModel:
    return load_dit(SOURCE, dtype=torch.float32, quantization=None if precision is None else quantization(precision))


def model(precision: str | None = None) -> WanModel:
    return copy.deepcopy(loaded(precision))


CONFIG = loaded().config


def attached(net: WanModel) -> dict[str, LowRank]:
    """The linears that have a LoRA, by name."""
    return {n: m for n, m in net.named_modules() if isinstance(m, LowRank) and m.lora_down is not None}


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    return expected_shapes(CONFIG)


LINEARS = sorted(attachable(CONFIG))


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    config = CONFIG
    return (
        torch.randn(1, config.in_channels, 3, 4, 4, generator=draw),
        torch.tensor([700.0]),
        torch.randn(1, 7, config.text_dim, generator=draw),
    )


@torch.no_grad()
def output(net: WanModel) -> Tensor:
    return net(*inputs())


def dense_model(changed: dict[str, Tensor]) -> WanModel:
    net = model()
    net.load_state_dict({**base(), **changed})
    return net


def put_on(net: WanModel, loras: list[Wanted], mode: str, precision: str | None = None) -> None:
    """Have just `loras` on a model of SOURCE, merged or attached, whatever was on it."""
    precision_of_weights = None if precision is None else quantization(precision)
    part = PartToLoad(recognise(SOURCE, "dit", load_dit), torch.float32, precision_of_weights)
    loras_on(net).merged.apply(net, loras if mode == "merge" else [], part)
    loras_on(net).attached.apply(net, loras if mode == "attach" else [], original=StoredValues(SOURCE))


def wanted(state: dict[str, Tensor], strength: float = 1.0, key: str = "a") -> Wanted:
    return Wanted(read_lora(state, shapes()), strength, (key, 0, 0))


def kohya(module: str, **roles: Tensor) -> dict[str, Tensor]:
    name = "lora_unet_" + module.replace(".", "_")
    return {f"{name}.{role}": value for role, value in roles.items()}


def kohya_pair(n: int, k: int) -> dict[str, Tensor]:
    return {"lora_down.weight": torch.randn(3, k) * 0.1, "lora_up.weight": torch.randn(n, 3)}


def loha(n: int, k: int, r: int) -> dict[str, Tensor]:
    sizes = {"w1_a": (n, r), "w1_b": (r, k), "w2_a": (n, r), "w2_b": (r, k)}
    return {f"hada_{name}": torch.randn(size) * 0.2 for name, size in sizes.items()}


def lokr(n: int, k: int, r: int, first: bool, second: bool) -> dict[str, Tensor]:
    a, b = 4, 8
    factors = {}
    for name, split, (rows, columns) in (("w1", first, (a, b)), ("w2", second, (n // a, k // b))):
        if split:
            factors |= {f"lokr_{name}_a": torch.randn(rows, r) * 0.2, f"lokr_{name}_b": torch.randn(r, columns) * 0.2}
        else:
            factors[f"lokr_{name}"] = torch.randn(rows, columns) * 0.1
    return factors


FORMS: dict[str, Callable[[int, int], dict[str, Tensor]]] = {
    "LoHa": lambda n, k: loha(n, k, 3),
    "LoHa of a large rank": lambda n, k: loha(n, k, 12),
    "LoKr": lambda n, k: lokr(n, k, 3, False, False),
    "LoKr, second split": lambda n, k: lokr(n, k, 3, False, True),
    "LoKr, both split": lambda n, k: lokr(n, k, 3, True, True),
    "DoRA": lambda n, k: {**kohya_pair(n, k), "dora_scale": torch.rand(n, 1) + 0.5},
    "DoRA of columns": lambda n, k: {**kohya_pair(n, k), "dora_scale": torch.rand(1, k) + 0.5},
    "DoRA of a LoKr": lambda n, k: {**lokr(n, k, 3, False, True), "dora_scale": torch.rand(n, 1) + 0.5},
}  # fmt: skip


def lora_of(modules: list[str], seed: int, rank: int = RANK, scale: float = 0.1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for module in modules:
        n, k = shapes()[f"{module}.weight"]
        state[f"diffusion_model.{module}.lora_down.weight"] = torch.randn(rank, k, generator=draw) * k**-0.5
        state[f"diffusion_model.{module}.lora_up.weight"] = torch.randn(n, rank, generator=draw) * scale
    return state


def quantization(precision: str) -> Quantization:
    scheme = find_quantization(precision, CPU)
    assert scheme is not None
    return scheme


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


REQUEST = Request(prompt="a red circle moving right on a blue background", steps=3, width=32, height=32, frames=5)


def latents(**options) -> tuple[Tensor, SimpleNamespace]:
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", **options))
    result = pipe.generate(REQUEST)
    return result.latents, SimpleNamespace(**result.report.as_dict())
