"""Suite `four-step`: videos of four steps on step-distilled weights, and what a LoRA costs.

The weights and the LoRA (rank 64, on every linear of the blocks, one for both experts) are random: their numbers mean
nothing, their shapes are those of the real ones.

load                one expert with some blocks (--layers, 8), from a bf16 file in the page cache to weights that are
                    encoded on the device; `load, LoRA merged` and `load, LoRA attached` the same with a LoRA, whose
                    `ratio` below 1 is what it costs
start               all models of the generation: drawn, with the LoRA merged into both experts
text ... decode     phases of one video of the preset `4-step`, after a shorter one of that size
denoise + decode    their sum
denoise, attached   at the first size: the denoising again, with the LoRA attached a second time: what products of low
                    rank cost
total               what a user waits for who has everything loaded
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import parse_size
from benchmarks.generation import PROMPT
from benchmarks.measure import make_room, settle
from benchmarks.rows import Row, guarded
from benchmarks.setups import Setup, find_setup
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import save, write_safetensors
from wan_core.config import LoraOptions, OptionError, Request
from wan_core.execution.report import GIB
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.linears import quantized_names
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.loras import AppliedLoras, Wanted, merging, read_loras
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import RANDOM, TINY, find_experts

RANK = 64
LAYERS = 8  # of the expert whose loading is measured: a fifth of the file of the real one
LOAD = "load"


def four_step_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Raises OptionError for a --scratch that is no folder."""
    scratch: Path | None = options.scratch
    if scratch is not None and not scratch.is_dir():
        raise OptionError(f"--scratch {scratch} is no folder: make it, or leave it out")
    default = "fp8 + cudnn-fp8" if device.type == "cuda" else "plain torch"
    setups = [find_setup(entry) for entry in options.setup or [default]]
    details |= {"rank": RANK, "preset": "4-step"}
    with tempfile.TemporaryDirectory(prefix="wancore-four-step-", dir=scratch) as folder:
        yield from loading_rows(name, sizes[0], setups[0], device, options, Path(folder))
        for setup in setups:
            yield from video_rows(name, sizes, setup, device, options, Path(folder))


# ------------------------------------------------------------------------------------------------------------- loading


def loading_rows(
    name: str, size: str, setup: Setup, device: torch.device, options: argparse.Namespace, folder: Path
) -> Iterator[Row]:
    config = config_of(name)
    config = replace(config, num_layers=min(config.num_layers, options.layers or LAYERS))
    model, lora = folder / "model.safetensors", folder / "lora.safetensors"
    expert = random_module(config, device=device, dtype=torch.bfloat16)
    assert isinstance(expert, WanModel)
    save(expert, model)
    del expert
    write_lora(lora, config, device)
    given = read_loras([LoraOptions(path=str(lora))], config, two_experts=False)["high"]
    base: float | None = None
    for row, how in ((LOAD, None), (f"{LOAD}, LoRA merged", "merge"), (f"{LOAD}, LoRA attached", "attach")):
        make_room(device)
        found = guarded(row, size, None, lambda how=how: load_row(model, given, how, setup, device, options.runs or 3))
        if how is None:
            base = found.get("seconds")
        elif base is not None and "seconds" in found:
            found |= {"ratio": round(base / found["seconds"], 4), "ratio_to": LOAD}
        yield found


def load_row(path: Path, loras: list[Wanted], how: str | None, setup: Setup, device: torch.device, runs: int) -> Row:
    """Median of `runs` loads after one that brings the files into the page cache."""
    seconds = []
    for _ in range(runs + 1):
        settle(device)
        begin = time.perf_counter()
        quantization, dtype = setup.quantization(device), torch.bfloat16 if device.type == "cuda" else torch.float32
        merge = merging(loras, device) if how == "merge" else None
        model = load_dit(path, device=device, dtype=dtype, quantization=quantization, loras=merge)
        if how == "attach":
            AppliedLoras.of(model, device).apply(loras)
        settle(device)
        seconds.append(time.perf_counter() - begin)
        del model
        make_room(device)
    timed = seconds[1:]
    return {
        "seconds": round(statistics.median(timed), 4),
        "spread": round(max(timed) - min(timed), 4),
        "file_gib": round(path.stat().st_size / GIB, 3),
    }


def config_of(name: str) -> DiTConfig:
    """Of the expert of "random:TASK", or of the embedded model."""
    if name.startswith("random:"):
        return RANDOM[name.removeprefix("random:")][0]
    return find_experts(TINY / "t2v_high.safetensors").dit


def write_lora(path: Path, config: DiTConfig, device: torch.device, rank: int = RANK) -> None:
    """A random LoRA in LightX2V's spelling, bf16, on all linears of the blocks; small enough to change little."""
    draw = torch.Generator(device).manual_seed(7)
    block = replace(config, num_layers=1)
    sides = dict.fromkeys(quantized_names(block), (config.dim, config.dim))
    sides |= {"blocks.0.ffn.0": (config.ffn_dim, config.dim), "blocks.0.ffn.2": (config.dim, config.ffn_dim)}
    state: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        for short, (n, k) in sides.items():
            module = f"diffusion_model.{short.replace('blocks.0.', f'blocks.{layer}.')}"
            down = torch.randn(rank, k, generator=draw, device=device) * k**-0.5
            up = torch.randn(n, rank, generator=draw, device=device) * 0.05 * rank**-0.5
            state[f"{module}.lora_down.weight"], state[f"{module}.lora_up.weight"] = down.bfloat16(), up.bfloat16()
            state[f"{module}.alpha"] = torch.tensor(float(rank))
    write_safetensors(state, path, {"distilled": "4-step"})


# -------------------------------------------------------------------------------------------------------------- videos


def video_rows(
    name: str, sizes: list[str], setup: Setup, device: torch.device, options: argparse.Namespace, folder: Path
) -> Iterator[Row]:
    lora = folder / "whole_lora.safetensors"
    if not lora.exists():
        write_lora(lora, config_of(name), device)
    loras = (LoraOptions(path=str(lora)),)
    make_room(device)
    reason = setup.why_not(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if reason is not None:
        yield {"name": setup.name, "size": sizes[0], "why_not": reason}
        return
    load = replace(setup.load_options(name, device), loras=loras, lora_mode="merge")
    pipe = Pipeline.load(load)
    yield {"name": f"start ({setup.name})", "size": sizes[0], **phase(pipe.loaded.as_dict()["phases"], "load")}
    for size in sizes:
        row = guarded(
            setup.name, size, None, lambda z=size: {"rows": video(pipe, z, setup, folder, options.steps, z == sizes[0])}
        )
        yield from row.get("rows", [row])


@torch.no_grad()
def video(pipe: Pipeline, size: str, setup: Setup, folder: Path, steps: int | None, attached: bool = True) -> list[Row]:
    """The rows of one size."""
    width, height, frames = parse_size(size)
    request = Request(prompt=PROMPT, width=width, height=height, frames=frames, steps=steps, preset="4-step")
    wanted = read_loras(
        [LoraOptions(path=str(folder / "whole_lora.safetensors"))], pipe.models.dit_config, pipe.models.task.two_experts
    )
    with setup.running():
        pipe.generate(replace(request, steps=2))
        report = pipe.generate(request).report.as_dict()
        beside = again(pipe, request, wanted) if attached else {}
    phases = {name: numbers for name, numbers in report["phases"].items() if name != "load"}
    denoising = [name for name in phases if name.startswith("denoise")]
    rows: list[Row] = [{"name": name, "size": size, **numbers} for name, numbers in phases.items()]
    peak = max((phases[name].get("peak_gib", 0.0) for name in (*denoising, "decode")), default=0.0)
    both = sum(phases[name]["seconds"] for name in (*denoising, "decode"))
    rows.append({"name": "denoise + decode", "size": size, "seconds": round(both, 4), "peak_gib": peak})
    merged = sum(phases[name]["seconds"] for name in denoising)
    rows.append({"name": "denoise", "size": size, "seconds": round(merged, 4)})
    if beside:
        seconds = sum(beside[name]["seconds"] for name in denoising)
        row = {"name": "denoise, attached", "size": size, "seconds": round(seconds, 4)}
        rows.append(row | {"ratio": round(merged / seconds, 4), "ratio_to": "denoise"})
    whole = sum(numbers["seconds"] for numbers in phases.values())
    rows.append({"name": "total", "size": size, "seconds": round(whole, 4)})
    return rows


def again(pipe: Pipeline, request: Request, wanted: Mapping[str, list[Wanted]]) -> dict[str, Any]:
    """Phases of the same video with LoRAs attached, and taken away afterwards."""
    for name, loras in wanted.items():
        AppliedLoras.of(pipe.models.expert(name), pipe.models.device).apply(loras)
    try:
        pipe.generate(replace(request, steps=2))
        return pipe.generate(request).report.as_dict()["phases"]
    finally:
        for name in wanted:
            AppliedLoras.of(pipe.models.expert(name), pipe.models.device).clear()


def phase(phases: Mapping[str, Any], name: str) -> dict[str, Any]:
    return dict(phases.get(name, {}))
