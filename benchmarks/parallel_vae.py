"""The VAE in suite `parallel`: decoding and encoding on one GPU, and in strips on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.cases import parse_size
from benchmarks.measure import measure, relative_error
from benchmarks.ranks import Ranks
from benchmarks.rows import Row, guarded
from wan_core.checkpoint import load_vae
from wan_core.checkpoint.random import random_module
from wan_core.execution.optimize import optimize_vae
from wan_core.models.vae.config import VAE_21
from wan_core.models.vae.vae import VideoVAE
from wan_core.pipeline.sources import TINY


def vae_rows(ranks: Ranks) -> Iterator[Row]:
    if ranks.device.type == "cuda":
        vae = random_module(VAE_21, device=ranks.device, dtype=ranks.dtype)
    else:
        vae = load_vae(TINY / "vae.safetensors", dtype=ranks.dtype)
    assert isinstance(vae, VideoVAE)
    for size in ranks.sizes:
        width, height, frames = parse_size(size)
        stride = vae.config.spatial_stride
        shape = (1, vae.config.z_dim, (frames - 1) // 4 + 1, height // stride, width // stride)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(ranks.device)
        video = torch.rand(1, 3, frames, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1
        video = video.to(ranks.device, vae.conv2.weight.dtype)
        for name, run in {
            "decode": lambda n, x=latents: vae.decode(x, chunk=n),
            "encode": lambda n, x=video: vae.encode(x, chunk=n),
        }.items():
            optimize_vae(vae, ranks.device)
            vae.strips = None
            row, output = {}, None
            if ranks.first:
                row, output = _timed(ranks, f"{name}, 1 GPU", size, lambda r=run: r(1))
            ranks.wait()
            yield row
            optimize_vae(vae, ranks.device, ranks.world)
            shared, found = _timed(ranks, f"{name}, strips {ranks.count}", size, lambda r=run: r(vae.strips.chunk))
            if output is not None and found is not None:
                shared["error"] = relative_error(found, output)
                shared |= {"ratio": round(row["seconds"] / shared["seconds"], 4), "ratio_to": row["name"]}
            yield shared


def _timed(ranks: Ranks, name: str, size: str, run: Callable[[], Tensor]) -> tuple[Row, Tensor | None]:
    found: list[Tensor] = []

    def make() -> Row:
        measured = measure(lambda: run, ranks.device, ranks.runs)
        found.append(measured.output.cpu())
        return measured.numbers()

    return guarded(name, size, None, make), found[0] if found else None
