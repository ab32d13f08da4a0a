"""Run by ComfyUI's Python: three phases of one run against three KSampler (Advanced), on tiny random weights in
float32 (`native_checks`)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from native_models import Accelerated as World
from native_models import error, rows, tiny

SIZE = {"dim": 256, "ffn_dim": 128, "freq_dim": 256, "text_dim": 4096, "num_heads": 2, "num_layers": 2}
LATENTS = (1, 16, 3, 8, 12)
SHIFT, STEPS, CUTS = 3.0, 8, (0, 1, 4, 8)  # what 8-step-motion is for text-to-video
MATRICES = ("self_attn.q", "self_attn.o", "cross_attn.k", "ffn.0")


def lora(seed: int) -> dict[str, Any]:
    state = {}
    for place, name in enumerate(f"blocks.{block}.{name}" for block in range(2) for name in MATRICES):
        outputs = SIZE["ffn_dim"] if name.endswith("ffn.0") else SIZE["dim"]
        state[f"diffusion_model.{name}.lora_down.weight"] = rows(4, SIZE["dim"], seed=seed + 2 * place) * 0.06
        state[f"diffusion_model.{name}.lora_up.weight"] = rows(outputs, 4, seed=seed + 2 * place + 1) * 0.3
    return state


def conditions(seed: int) -> list[Any]:
    import torch

    text = torch.zeros(1, 512, 4096)
    text[:, :7] = rows(1, 7, 4096, seed=seed)
    return [[text, {"pooled_output": None}]]


def theirs(models: dict[str, Any], loras: dict[str, Any], cuts: tuple[int, ...]) -> Any:
    """KSampler (Advanced) of each phase: guided without a LoRA, with it, the low-noise expert with it."""
    import comfy.sample
    import comfy.sd
    import torch
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    latent, noise = torch.zeros(LATENTS), comfy.sample.prepare_noise(torch.zeros(LATENTS), 5)
    phases = (("high", False, 3.5), ("high", True, 1.0), ("low", True, 1.0))
    for (expert, with_lora, guidance), start, end in zip(phases, cuts, cuts[1:], strict=False):
        if start == end:
            continue
        model = ModelSamplingSD3().patch(models[expert], SHIFT)[0]
        model = comfy.sd.load_lora_for_models(model, None, loras[expert], 1.0, 0.0)[0] if with_lora else model
        numbers = (STEPS, guidance, "euler", "simple", conditions(1), conditions(2), latent)
        latent = comfy.sample.sample(
            model, noise, *numbers, disable_noise=start > 0, start_step=start, last_step=end,
            force_full_denoise=end == STEPS, disable_pbar=True, seed=5,
        )  # fmt: skip
        noise = torch.zeros(LATENTS)
    return latent


def ours(files: dict[str, Path], loras: dict[str, Path], mode: str, preset: str) -> Any:
    import torch

    from wan_core.config import LoadOptions, LoraOptions
    from wan_core.execution.report import Report
    from wan_core.pipeline.denoise import sample_latents
    from wan_core.pipeline.load import load_models
    from wan_core.pipeline.run import OwnMemory
    from wan_core.pipeline.sources import find_experts
    from wan_core.sampling.build import ModelFacts, PlanRequest, build_plan
    from wan_core.sampling.conditioning import Conditioning
    from wan_core.sampling.start import Start

    models, report = find_experts(str(files["high"]), str(files["low"])), Report(torch.device("cpu"))
    lora_options = tuple(LoraOptions(path=str(path), expert=expert) for expert, path in loras.items())
    options = LoadOptions(
        high=str(files["high"]),
        low=str(files["low"]),
        precision="fp32",
        device="cpu",
        lora_mode=mode,
        loras=lora_options,
    )
    facts = ModelFacts(
        task=models.task, dit=models.dit, vae=models.vae, high=files["high"], loras=tuple(loras.values())
    )
    plan = build_plan(PlanRequest(preset=preset, shift=SHIFT, boundary=0.8), facts)
    text = Conditioning(cond=conditions(1)[0][0], uncond=conditions(2)[0][0])
    start = Start(shape=LATENTS, seed=5)
    noise = start.sample(plan, models.vae, report.device)
    owner = OwnMemory(load_models(models, options, report), report)
    return sample_latents(plan, owner, text, noise, models.vae, report, start=start)


def check_phases(_: World) -> None:
    """Each way to apply LoRAs gives the samplers' latents, which a run without the first phase does not."""
    import torch

    from wan_core.checkpoint.save import write_safetensors

    models = {expert: tiny("WAN21_T2V", seed, **SIZE) for seed, expert in enumerate(("high", "low"))}
    states = {expert: lora(100 * (1 + place)) for place, expert in enumerate(models)}
    with tempfile.TemporaryDirectory() as folder:
        files = {expert: Path(folder) / f"t2v_{expert}_noise.safetensors" for expert in models}
        loras = {expert: Path(folder) / f"lightx2v_4steps_{expert}_noise.safetensors" for expert in models}
        for expert, model in models.items():
            write_safetensors(dict(model.model.diffusion_model.state_dict()), files[expert], {})
            write_safetensors(states[expert], loras[expert], {})
        with torch.inference_mode():
            expected = theirs(models, states, CUTS)
        for mode in ("merge", "attach"):
            assert error(ours(files, loras, mode, "8-step-motion"), expected) < 1e-5, mode
        assert error(ours(files, loras, "merge", "8-step"), expected) > 0.01
