"""What worker processes compute for the nodes of a graph is what one process computes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decoded import decode_images
from tests.workers.running_workers import LEAST, MESH, SMALL, ranks, run
from tools.processes import memory_of
from wan_core import load_text_encoder, load_vae, make_plan
from wan_core.checkpoint import save
from wan_core.config import (
    LoadOptions,
    NagOptions,
)
from wan_core.execution.report import Report
from wan_core.models.text.tokenizer import TokenCount
from wan_core.models.text.umt5 import PromptCache
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.wan.families.wan.inputs import join_image
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.encode import encode_images
from wan_core.pipeline.sources import TINY as TINY_FILES
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.control import with_nag
from wan_core.sampling.denoise import Ready
from wan_core.sampling.plan import Plan, cut_plan
from wan_core.sampling.schedules import Window
from wan_core.sampling.start import Leftover, Start
from wan_core.workers.client import WorkerEngine, on_steps
from wan_core.workers.launcher import Workers


def test_the_same_result_as_one_process_and_many_prompts_take_no_more_memory(
    workers: Workers, alone: torch.Tensor
) -> None:
    for prompt in range(18):
        run(workers, **LEAST)
        if prompt == 7:
            before = [memory_of(pid) for pid in ranks(workers)]
    grown = [memory_of(pid) - bytes_before for pid, bytes_before in zip(ranks(workers), before, strict=True)]
    assert max(grown) < 5 * 2**20, grown
    assert (run(workers).latents - alone).abs().max() < 1e-4


pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.slow]
CPU = torch.device("cpu")


def test_the_parts_that_a_graph_asks_for_are_those_of_one_process(workers: Workers) -> None:
    """Text, an image encoded, sampling from image channels, decoding whole and in tiles."""
    spec = {"path": str(TINY_FILES / "vae.safetensors"), "precision": "auto"}
    vae, report = load_vae(TINY_FILES / "vae.safetensors", dtype=torch.float32), Report(CPU)
    images = torch.rand(5, 48, 64, 3, generator=torch.Generator().manual_seed(1))
    latents = encode_images(vae, images)
    engine = WorkerEngine(workers)
    assert (engine.ask(Tensor, "encode", spec, images=images) - latents).abs().max() < 1e-4
    for tile in (None, TileSpec(height=4, width=4, overlap=2)):
        seen, pieces = list[int](), list[Tensor]()

        def piece(first: int, images: Tensor, pieces: list[Tensor] = pieces) -> None:
            pieces.append(images)

        events = {"piece": piece, "frames": lambda done, total, seen=seen: seen.append(done)}
        engine.ask(None, "decode", spec, report, events, latents=latents, uint8=False, tile=tile)
        assert (torch.cat(pieces) - decode_images(vae, latents, Report(CPU), tile=tile)).abs().max() < 1e-4
        assert seen == sorted(seen) and seen[-1] == 5

    prompts = [SMALL["prompt"], "", "a green square"]
    encoder = load_text_encoder(TINY_FILES / "text_encoder.safetensors", dtype=torch.float32)
    text = {"path": str(TINY_FILES / "text_encoder.safetensors"), "precision": "fp32"}
    cache = PromptCache()
    rows, counts = engine.ask(tuple[Tensor, tuple[TokenCount, ...]], "text", text, prompts=prompts)
    for row, count, expected_row in zip(rows, counts, cache.encode(prompts, encoder.read), strict=True):
        torch.testing.assert_close(row[None, : count.read], expected_row, atol=1e-5, rtol=0)

    high, low = (str(TINY_FILES / f"i2v_{name}.safetensors") for name in ("high", "low"))
    found_experts, plan = find_experts(high, low), make_plan(task="i2v-tiny", steps=4, guidance_high=1.0)
    plan = with_nag(plan, NagOptions())  # where the high-noise expert has no guidance
    cond, uncond = cache.encode(prompts[:2], encoder.read)
    concat = join_image(latents, torch.ones_like(latents[:, :1]), found_experts.vae)
    tensors = {"cond": cond, "uncond": uncond, "concat": concat}
    experts = {
        "high": found_experts.high.load(CPU, torch.float32, None),
        "low": found_experts.low.load(CPU, torch.float32, None),
    }
    noise = draw_noise(7, tuple(latents.shape))
    alone = sample_latents(
        plan, Ready(experts.__getitem__), Conditioning(**tensors), noise, found_experts.vae, Report(CPU)
    )
    model = LoadOptions(high=high, low=low, precision="fp32")
    steps: list[tuple[int, tuple[int, ...]]] = []
    start = Start(shape=tuple(latents.shape), seed=7)
    step = on_steps([plan], lambda done, _: steps.append((done.step.index, tuple(done.preview().shape))))
    together, _ = sampled(engine, model, plan, tensors, start, report, {"step": step})
    assert (together - alone).abs().max() < 1e-4
    assert steps == [(i, (1, 16, 2, 6, 8)) for i in range(4)]
    halves = [cut_plan(replace(plan, window=Window(start=s, end=e, leftover=True))) for s, e in ((0, 2), (2, 4))]
    made, leftover = sampled(engine, model, halves[0], tensors, start, Report(CPU))
    start = replace(start, add_noise=False, latents=made, leftover=leftover)
    made, end = sampled(engine, model, halves[1], tensors, start, Report(CPU))
    assert leftover and end is None and (made - together).abs().max() < 1e-5, (
        "two runs in a row, their state sent back and on"
    )
    assert report.phases["denoise high"].steps + report.phases["denoise low"].steps == 4
    assert report.settings["mesh"] == MESH


def sampled(
    engine: WorkerEngine,
    models: LoadOptions,
    plan: Plan,
    conditioning: dict[str, Tensor],
    start: Start,
    report: Report,
    events: dict[str, Any] | None = None,
) -> tuple[Tensor, Leftover | None]:
    plan = replace(plan, latent_shape=start.shape)
    asked = {"plan": plan, "conditioning": conditioning, "start": start, "fps": 8}
    return engine.sample(models, report, events or {}, keep=None, **asked)


def test_a_file_that_was_replaced_is_read_again(workers: Workers, tmp_path: Path) -> None:
    """Under its old name, of the same size: what the workers hold is no longer what is asked for."""
    path = tmp_path / "vae.safetensors"
    images = torch.rand(5, 48, 64, 3, generator=torch.Generator().manual_seed(1))
    for factor in (1.0, 1.5):
        vae = load_vae(TINY_FILES / "vae.safetensors", dtype=torch.float32)
        with torch.no_grad():
            next(vae.parameters()).mul_(factor)
        save(vae, path)
        latents = WorkerEngine(workers).ask(Tensor, "encode", {"path": str(path), "precision": "auto"}, images=images)
        assert (latents - encode_images(vae, images)).abs().max() < 1e-4
