"""A template with WanCore from MODEL and WanCore Sampler in the place of ComfyUI's samplers, on the same sigmas."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from benchmarks.comfyui import Graph, node

OURS = "WanCoreSampler"
SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced")  # ComfyUI's
RUN = {"precision": "checkpoint", "attention": "auto", "residency": "auto"}
FIRST_OF_TWO = "KSamplerAdvanced", "enable"  # what it says of adding noise: another one goes on where it ends
SOLVERS = {"lcm": "lcm", "uni_pc": "unipc", "euler": "euler"}  # ComfyUI's name -> ours


def with_our_sampler(graph: Graph, model: Mapping[str, Any] | None = None, devices: str | None = None) -> Graph:
    """model: inputs of WanCore from MODEL. devices: of WanCore Launcher; None: there is none. Two KSamplerAdvanced, of
    which one goes on where the other ends, are one sampler with two experts. Raises ValueError for other samplers than
    these, KSampler and SamplerCustom."""
    made = deepcopy(graph)
    own: dict[str, Any] = {**RUN, **(model or {})}
    if devices is not None:
        made["loaders.workers"] = node("WanCoreLauncher", devices=devices)
        own["workers"] = ["loaders.workers", 0]
    for name, one in graph.items():
        kind, inputs = one["class_type"], one["inputs"]
        if kind not in SAMPLERS or (kind == FIRST_OF_TWO[0] and inputs["add_noise"] == FIRST_OF_TWO[1]):
            continue
        low: dict[str, Any] = {}
        change: dict[str, Any] = {}
        last = inputs["cfg"]
        if kind == "KSamplerAdvanced":  # it goes on where another ends, which samples with the high-noise expert
            first, low = inputs["latent_image"][0], {"low": inputs["model"]}
            del made[first]
            inputs = graph[first]["inputs"]
            change = {"low_from_step": inputs["end_at_step"]}
        made[f"loaders.{name}"] = node("WanCoreFromModel", model=inputs["model"], **low, **own)
        links = {"model": [f"loaders.{name}", 0], "latent": inputs["latent_image"]}
        links |= {key: inputs[key] for key in ("positive", "negative")}
        numbers = {"steps": 0, "shift": 0.0, "boundary": 0.0, "preset": "none"}
        guidance = {"guidance_high": inputs["cfg"], "guidance_low": last, "guidance_mode": "auto"}
        schedule = schedule_of(made, graph, name, kind, inputs)
        made[name] = node(OURS, **links, **numbers, **guidance, **schedule, **change)
    return made


def schedule_of(made: Graph, graph: Graph, name: str, kind: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Seed, solver and sigmas of a sampler of ComfyUI."""
    if kind == "SamplerCustom":
        chosen = graph[inputs["sampler"][0]]["inputs"]["sampler_name"]
        return {"seed": inputs["noise_seed"], "solver": SOLVERS[chosen], "sigmas": inputs["sigmas"]}
    if not kind.startswith("KSampler"):
        raise ValueError(f"{kind} of a template is not replaced by our sampler")
    numbers = {key: inputs[key] for key in ("model", "scheduler", "steps")}
    made[f"loaders.sigmas {name}"] = node("BasicScheduler", **numbers, denoise=inputs.get("denoise", 1.0))
    seed = inputs.get("seed", inputs.get("noise_seed"))
    return {"seed": seed, "solver": SOLVERS[inputs["sampler_name"]], "sigmas": [f"loaders.sigmas {name}", 0]}
