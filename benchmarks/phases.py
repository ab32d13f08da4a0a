"""Runs in which LoRAs change their strength (preset motion): seconds of a change, and the difference from the same run
with models that were loaded with and without LoRAs. Random weights of A14B.

    python -m benchmarks.phases --layers 10 --scratch FOLDER --out benchmarks/results/lora-phases-h200-20261124.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import save, write_safetensors
from wan_core.config import LoadOptions, LoraOptions, SkipOptions, SparseOptions
from wan_core.execution.report import Report
from wan_core.models.wan.config import T2V_A14B
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.load import Models, load_models
from wan_core.pipeline.memory_planning import Workload
from wan_core.pipeline.run import OwnMemory
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.build import ModelFacts, PlanRequest, build_plan
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import Ready
from wan_core.sampling.plan import Plan
from wan_core.sampling.start import Start
from wan_core.sampling.steps import Expert

RANK = 64
SIZE = "832x480x81"
LATENTS = (1, 16, 21, 60, 104)
SMALL = (1, 16, 2, 8, 8)  # on a CPU, to try it
CASES: dict[str, dict[str, Any]] = {
    "bf16, merged": {"lora_mode": "merge"},
    "fp8, merged": {"lora_mode": "merge", "precision": "fp8"},
    "bf16, attached": {"lora_mode": "attach"},
    "fp8, attached": {"lora_mode": "attach", "precision": "fp8"},
    "bf16, merged, 2 blocks stay": {"lora_mode": "merge", "residency": "stream", "resident_blocks": 2},
    "fp8, merged, sparse": {"lora_mode": "merge", "precision": "fp8", "sparse": True},
}


class Apart(Ready):
    """Models with and without LoRAs, one after the other: only one pair is in memory."""

    def __init__(self, load: Any) -> None:
        self.load, self.models, self.without = load, None, False

    def acquire(self, expert: Expert, loras: object = ()) -> WanModel:
        if self.models is None or bool(loras) != self.without:
            self.models, self.without = None, bool(loras)
            torch.cuda.empty_cache()
            self.models = self.load(not loras)
        return self.models.expert(expert)


def write_files(folder: Path, layers: int, device: torch.device) -> dict[str, Path]:
    """A transformer, which stands for both experts, and a LoRA on every matrix of its blocks."""
    config = replace(T2V_A14B, num_layers=layers)
    model = cast(WanModel, random_module(config, device=device, dtype=torch.bfloat16, seed=1))
    files = {"model": folder / "t2v_high_noise.safetensors", "lora": folder / "lightx2v_4steps.safetensors"}
    save(model, files["model"], torch.bfloat16)
    draw, state = torch.Generator().manual_seed(2), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("blocks."):
            outputs, inputs = module.weight.shape
            state[f"diffusion_model.{name}.lora_down.weight"] = torch.randn(RANK, inputs, generator=draw) * inputs**-0.5
            state[f"diffusion_model.{name}.lora_up.weight"] = torch.randn(outputs, RANK, generator=draw) * 0.01
    write_safetensors({key: value.bfloat16() for key, value in state.items()}, files["lora"], {})
    return files


def walk(plan: Plan, owner: Any, vae: Any, report: Report, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    text = Conditioning(cond=draw_noise(1, (1, 100, 4096)).to(device), uncond=draw_noise(2, (1, 100, 4096)).to(device))
    start = Start(shape=shape, seed=5)
    return sample_latents(plan, owner, text, start.sample(plan, vae, device), vae, report, start=start)


def measure(name: str, files: dict[str, Path], device: torch.device, shape: tuple[int, ...]) -> dict[str, Any]:
    case = dict(CASES[name])
    sparse = SkipOptions(sparse=SparseOptions(sparsity=0.75)) if case.pop("sparse", False) else None
    path = str(files["model"])
    found = find_experts(path, path)
    facts = ModelFacts(
        task=found.task, dit=found.dit, vae=found.vae, high=files["model"], low=files["model"], loras=(files["lora"],)
    )
    plan = build_plan(PlanRequest(preset="motion", width=832, height=480, frames=81, skip=sparse), facts).plan

    def load(with_loras: bool = True) -> Models:
        loras = (LoraOptions(path=str(files["lora"])),) if with_loras else ()
        options = LoadOptions(high=path, low=path, device=str(device), **{"precision": "bf16", **case}, loras=loras)
        models = load_models(found, options, Report(device), Workload(shape, plan, batched=False))
        models.place(Workload(shape, plan, batched=False))
        return models

    models, reports, results = load(), [], []
    for _ in range(2):
        report = Report(device)
        results.append(walk(plan, OwnMemory(models, report), found.vae, report, device, shape))
        reports.append(report)
    del models
    torch.cuda.empty_cache()
    expected = walk(plan, Apart(load), found.vae, Report(device), device, shape)
    phases = {phase: one.seconds for phase, one in reports[1].phases.items()}
    return {
        "name": name,
        "size": SIZE,
        "seconds": round(phases.get("LoRAs high", 0.0) / 2, 4),  # two changes of the high-noise expert in a run
        "denoise": round(sum(seconds for phase, seconds in phases.items() if phase.startswith("denoise")), 3),
        "error": float((results[1] - expected).norm() / expected.norm()),
        "again": float((results[1] - results[0]).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=CASES)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = LATENTS if device.type == "cuda" else SMALL
    files = write_files(options.scratch, options.layers, device)
    torch.cuda.empty_cache()
    rows = []
    for name in options.case or CASES:
        rows.append(measure(name, files, device, shape))
        print(rows[-1], flush=True)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        made = {
            "suite": "phases",
            "command": " ".join(["python -m benchmarks.phases", *sys.argv[1:]]),
            "commit": commit,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "layers": options.layers,
            "rank": RANK,
            "rows": rows,
        }
        options.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
