"""The arithmetic of one forward, and what this device reaches where nothing is in the way: the yardstick of a row's
share, measured in the same run.

A data sheet's number is not it: clocks fall with power, and power with the data. The products here are of random
numbers (zeros run up to a third faster) and as large as the model's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from wan_core.models.wan.config import DiTConfig
from wan_core.ops.cards import has_fp8
from wan_core.ops.kernels.formats import FP8


@dataclass(frozen=True)
class Flops:
    """Operations of one forward of one sample, counted from the architecture: what time is divided into.

    Counted are matrix products, two operations for each multiplication with its addition: linears, self-attention and
    cross-attention. Norms, rotations and activations are memory traffic, and leaving them out is the custom. What a
    prompt needs once belongs to no forward; a peer that computes it in every step gets no credit for that.
    """

    linears: int  # of the blocks: what FP8 speeds up
    self_attention: int
    cross_attention: int
    ends: int  # patch and time embedding, head

    @property
    def total(self) -> int:
        return self.linears + self.self_attention + self.cross_attention + self.ends


def forward_flops(config: DiTConfig, tokens: int) -> Flops:
    """The products for one sample of `tokens` tokens that share one timestep, its text prepared."""
    C, N, L, S, blocks = config.dim, config.ffn_dim, tokens, config.text_len, config.num_layers  # C channels, N inside
    products = 4 * C * C + 2 * C * C + 2 * C * N  # q, k, v, o; q, o; up, down
    patch = prod(config.patch_size)
    ends = L * C * patch * (config.in_channels + config.out_channels) + (config.freq_dim + 7 * C) * C
    return Flops(
        linears=2 * blocks * L * products,
        self_attention=2 * blocks * 2 * L * L * C,
        cross_attention=2 * blocks * 2 * L * S * C,
        ends=2 * ends,
    )


SIDE, CPU_SIDE = 8192, 512
COPY_BYTES, CPU_COPY_BYTES = 2**31, 2**24
MIN_SECONDS = 0.5  # long enough for the clock to settle under load


def measure_peaks(device: torch.device) -> dict[str, float]:
    """TFLOP/s of matrix products in bf16 and, where the device has them, FP8 (one scale each); copied TB/s, read plus
    write."""
    cuda = device.type == "cuda"
    side = SIDE if cuda else CPU_SIDE
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=generator).bfloat16() for _ in range(2))
    operations = 2 * side**3
    peaks = {"bf16_tflops": operations / seconds_of(lambda: a @ b, device) / 1e12}
    if has_fp8(device):
        one = torch.ones((), device=device)
        x, w = a.to(FP8), b.to(FP8)  # [M, K] by rows and [K, N] by columns

        def product() -> torch.Tensor:
            return torch.ops.aten._scaled_mm(x, w.t(), one, one, None, None, torch.bfloat16, True)

        peaks["fp8_tflops"] = operations / seconds_of(product, device) / 1e12
    source = torch.empty(COPY_BYTES if cuda else CPU_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    peaks["copy_tb_s"] = 2 * source.numel() / seconds_of(lambda: target.copy_(source), device) / 1e12
    return {name: float(f"{value:.4g}") for name, value in peaks.items()}


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Mean seconds of a call among as many as fill `MIN_SECONDS`, queued without waiting in between."""
    calls = 1
    while True:
        seconds = _batch_seconds(call, calls, device)
        if seconds >= (MIN_SECONDS if device.type == "cuda" else MIN_SECONDS / 20):
            return seconds / calls
        calls *= 2


def _batch_seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    _settle(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    _settle(device)
    return time.perf_counter() - begin


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_at_peak(flops: Flops, peaks: dict[str, float], *, fp8_linears: bool, fp8_attention: bool) -> float:
    """How long a forward's products would take at the measured peaks, each in the precision that it is computed in."""
    bf16 = peaks["bf16_tflops"] * 1e12
    fp8 = peaks.get("fp8_tflops", peaks["bf16_tflops"]) * 1e12
    return (
        flops.linears / (fp8 if fp8_linears else bf16)
        + flops.self_attention / (fp8 if fp8_attention else bf16)
        + (flops.cross_attention + flops.ends) / bf16
    )
