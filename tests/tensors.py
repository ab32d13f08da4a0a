"""Random tensors and what tests of kernels compare them by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from wan_core.ops.kernels.formats import Quantized

ROOT = Path(__file__).parents[1]


def draw(*shape: int, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def qkv(
    queries: int,
    keys: int,
    heads: int = 2,
    dim: int = 16,
    batch: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Queries, keys and values, [B, L, H, D]."""
    lengths = (queries, keys, keys)
    return [draw(batch, n, heads, dim, seed=i, device=device, dtype=dtype) for i, n in enumerate(lengths)]


def relative(actual: Tensor | Quantized, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected, in float64."""
    plain = actual if isinstance(actual, Tensor) else actual.dequantize()
    return float((plain.double() - expected.double()).norm() / expected.double().norm())


def run_interpreted(code: str) -> None:
    """Runs `code`, which must print "all close", where Triton's interpreter stands for a GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "all close" in done.stdout, done.stderr[-2000:]
