"""Official templates with WanCore Sampler in the place of ComfyUI's, beside the native run of the same graph."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from benchmarks.comfyui import Graph
from tools.templates.run import Templates, observed

SOUND = "WanSoundImageToVideo"


def comparable(graph: Graph) -> Graph:
    """The graph with what both compute alike. Euler's steps: ComfyUI's UniPC is another solver than the reference's,
    and `simple` has the sigmas of WanCore's `euler` where the steps divide 1000. Weights as their files have them:
    WanCore From Model reads these, whatever ComfyUI's loader makes of them. A sound that never changes: ComfyUI has no
    copies of its first frame in front, so that its tokens hear other frames."""
    made = deepcopy(graph)
    changes = {
        "KSampler": {"sampler_name": "euler"},
        "KSamplerAdvanced": {"sampler_name": "euler"},
        "UNETLoader": {"weight_dtype": "default"},
        "StandInAudio": {"steady": True},
    }
    for one in made.values():
        one["inputs"] |= changes.get(one["class_type"], {})
    return made


def with_own_samplers(
    graph: Graph,
    *,
    solver: str = "euler",
    precision: str = "checkpoint",
    attention: str = "auto",
    sparse: str | None = None,
) -> Graph:
    """Every KSampler replaced, and every two KSamplerAdvanced of which one goes on where the other ends, under the name
    of the last; the models and their shift taken over, with ComfyUI's positions of motion frames. sparse: a preset of
    WanCore Sparse Attention."""
    made = deepcopy(graph)
    skipping = {} if sparse is None else {"skipping": ["sparse", 0]}
    if sparse is not None:
        custom = {"sparsity": 0.75, "dense_steps": 0.05, "ramp": 0.3, "dense_layers": 0, "mass": 0.0, "pooled": True}
        inputs = {"preset": sparse, **custom, "reuse": 1, "kernel": "auto"}
        made["sparse"] = {"class_type": "WanCoreSparseAttention", "inputs": inputs}
    for name, one in graph.items():
        stages = stages_of(graph, one)
        if not stages:
            continue
        for earlier in stages[:-1]:
            gone = next(other for other, stage in graph.items() if stage is earlier)
            del made[gone]
            made.pop(f"keep {gone}", None)
        first, last = stages[0]["inputs"], stages[-1]["inputs"]
        own, motion = f"own {name}", f"motion {name}"
        how = {"precision": precision, "attention": attention, "residency": "auto"}
        low = {} if len(stages) == 1 else {"low": last["model"]}
        made[own] = {"class_type": "WanCoreFromModel", "inputs": {"model": first["model"], **low, **how}}
        positive = first["positive"]
        if any(other["class_type"].startswith(SOUND) for other in graph.values()):
            made[motion] = {
                "class_type": "WanCoreMotionPositions",
                "inputs": {"positive": positive, "positions": "comfyui"},
            }
            positive = [motion, 0]
        inputs = {
            "model": [own, 0], "positive": positive, "negative": first["negative"], "latent": first["latent_image"],
            "seed": first.get("seed", first.get("noise_seed")), "steps": first["steps"], "shift": 0.0, "boundary": 0.0,
            "guidance_high": first["cfg"], "guidance_low": last["cfg"], "solver": solver, "guidance_mode": "auto",
            "preset": "none", **skipping,
        }  # fmt: skip
        made[name] = {"class_type": "WanCoreSampler", "inputs": inputs}
    return made


def stages_of(graph: Graph, last: dict[str, Any]) -> list[dict[str, Any]]:
    """The samplers that a WanCore Sampler takes the place of, of which `last` is the last; none where it is not."""
    if last["class_type"] == "KSampler":
        return [last]
    if last["class_type"] != "KSamplerAdvanced" or last["inputs"]["add_noise"] == "enable":
        return []
    return [graph[last["inputs"]["latent_image"][0]], last]


def differences(templates: Templates, name: str) -> dict[str, float]:
    """Of every sampler's latents from the native run's, relative to those. Raises AssertionError where one does not
    run."""
    graph = comparable(templates.graph(name))
    for run in ("native", "own"):
        own = with_own_samplers(graph) if run == "own" else graph
        done = templates.server.run(observed(own, run))
        assert done.ok, f"{name}, {run}: {done.status}"
    found = {}
    for path in sorted((templates.base / "output").glob("own-*.pt")):
        pair = torch.load(path), torch.load(path.with_name("native" + path.name.removeprefix("own")))
        found[path.stem.removeprefix("own-")] = float((pair[0] - pair[1]).norm() / pair[1].norm())
    for path in (templates.base / "output").glob("*.pt"):
        path.unlink()
    return found
