"""Two experts of a tiny transformer whose blocks stream, and a run of them."""

from __future__ import annotations

import torch

from tests.denoised import denoise
from wan_core.checkpoint.random import random_module
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import begin_run, optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.quant.swap import Quantization
from wan_core.sampling.conditioning import Conditioning, draw_noise

CPU = torch.device("cpu")
LAYERS = 4
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=64, ffn_dim=128, num_heads=2, num_layers=LAYERS, text_dim=48, text_len=32
)


def expert(seed: int, quantization: Quantization | None = None) -> WanModel:
    model = random_module(SMALL, device=CPU, dtype=torch.float32, seed=seed, quantization=quantization)
    assert isinstance(model, WanModel)
    return optimize(model, attend=resolve_attention("sdpa", CPU)[1])


def experts(quantization: Quantization | None = None) -> dict[str, WanModel]:
    return {"high": expert(0, quantization), "low": expert(1, quantization)}


def streaming(quantization: Quantization | None, resident: int | None) -> Residency:
    residency = Residency(CPU, "swap" if resident is None else "stream", resident_blocks=resident or 0)
    for name, model in experts(quantization).items():
        residency.add(name, model)
    return residency


def run(
    use, plan, *, batched=False, on_step=None, relieve=None, device=CPU, dtype=torch.float32,
    latents=(2, 4, 6),
):  # fmt: skip
    """The latents of a denoise of two random prompts; `use` gives the expert of a name."""

    def acquire(name):
        model = use(name)
        begin_run(model)
        return model

    text = [draw_noise(n, (1, 5, 48)).to(device, dtype) for n in (1, 2)]
    noise = draw_noise(7, (1, 16, *latents)).to(device)
    with torch.no_grad():
        return denoise(
            plan, acquire, Conditioning(cond=text[0], uncond=text[1]), noise,
            batched=batched, on_step=on_step, relieve=relieve,
        )  # fmt: skip
