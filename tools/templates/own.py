"""A template with WanCore's sampler in the place of ComfyUI's."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

Graph = dict[str, dict[str, Any]]
SOLVER = "euler"  # the one whose arithmetic both have
LOADED = {"precision": "checkpoint", "attention": "auto", "residency": "auto"}
SPARSE = {"sparsity": 0.75, "dense_steps": 0.05, "ramp": 0.3, "dense_layers": 0, "mass": 0.0, "pooled": True,
          "reuse": 1, "kernel": "auto"}  # fmt: skip
PLAIN = {"steps": 0, "shift": 0.0, "boundary": 0.0, "guidance_mode": "auto"}  # the task's own


def comparable(graph: Graph) -> Graph:
    """The graph with a solver that both samplers have, and weights as their files have them: WanCore From Model reads
    these, whatever ComfyUI's loader makes of them."""
    made = deepcopy(graph)
    for one in made.values():
        if one["class_type"].startswith("KSampler"):
            one["inputs"]["sampler_name"] = SOLVER
        elif one["class_type"] == "UNETLoader":
            one["inputs"]["weight_dtype"] = "default"
    return made


def with_own_sampler(graph: Graph, *, sparse: str | None = None, **loaded: Any) -> Graph:
    """Every KSampler, and every two KSamplerAdvanced of which one goes on where the other ends, as one WanCore Sampler
    under the name of the last. Its sigmas are those of the template. sparse: a preset of WanCore Sparse Attention.
    loaded: inputs of WanCore From Model."""
    made = deepcopy(graph)
    for name, one in graph.items():
        if one["class_type"] == "KSampler":
            replace_sampler(made, name, [one["inputs"]], loaded, sparse)
        elif one["class_type"] == "KSamplerAdvanced" and one["inputs"]["add_noise"] == "disable":
            first = one["inputs"]["latent_image"][0]
            replace_sampler(made, name, [graph[first]["inputs"], one["inputs"]], loaded, sparse)
            del made[first]
    return made


def replace_sampler(
    made: Graph, name: str, stages: list[dict[str, Any]], loaded: dict[str, Any], sparse: str | None
) -> None:
    """stages: the inputs of ComfyUI's sampler for the high-noise expert, and for the low-noise one if there is one."""
    first, last = stages[0], stages[-1]
    names = ("model",) if len(stages) == 1 else ("model", "low")
    models = {own: without_shift(made, stage["model"]) for own, stage in zip(names, stages, strict=True)}
    made[f"{name} model"] = {"class_type": "WanCoreFromModel", "inputs": {**models, **LOADED, **loaded}}
    schedule = {key: first[key] for key in ("model", "scheduler", "steps")}
    made[f"{name} sigmas"] = {
        "class_type": "BasicScheduler",
        "inputs": {**schedule, "denoise": first.get("denoise", 1.0)},
    }
    inputs = {
        **PLAIN,
        "model": [f"{name} model", 0],
        "positive": first["positive"],
        "negative": first["negative"],
        "latent": first["latent_image"],
        "seed": first.get("seed", first.get("noise_seed")),
        "guidance_high": first["cfg"],
        "guidance_low": last["cfg"],
        "solver": SOLVER,
        "sigmas": [f"{name} sigmas", 0],
    }
    if sparse is not None:
        made[f"{name} sparse"] = {"class_type": "WanCoreSparseAttention", "inputs": {**SPARSE, "preset": sparse}}
        inputs["skipping"] = [f"{name} sparse", 0]
    made[name] = {"class_type": "WanCoreSampler", "inputs": inputs}


def without_shift(graph: Graph, model: list[Any]) -> list[Any]:
    """The MODEL before ModelSamplingSD3, whose shift is in the sigmas already."""
    node = graph[model[0]]
    return node["inputs"]["model"] if node["class_type"] == "ModelSamplingSD3" else model
