"""Official templates with WanCore Sampler in the place of ComfyUI's, beside the native run of the same graph."""

from __future__ import annotations

from copy import deepcopy

import torch

from benchmarks.comfyui import Graph
from tools.templates.run import Templates, observed


def comparable(graph: Graph) -> Graph:
    """The graph with what both compute alike. Euler's steps: ComfyUI's UniPC is another solver than the reference's,
    and `simple` has the sigmas of WanCore's `euler` where the steps divide 1000. A sound that never changes: ComfyUI
    has no copies of its first frame in front, so that its tokens hear other frames."""
    made = deepcopy(graph)
    for one in made.values():
        if one["class_type"] == "KSampler":
            one["inputs"]["sampler_name"] = "euler"
        elif one["class_type"] == "StandInAudio":
            one["inputs"]["steady"] = True
    return made


def with_own_samplers(
    graph: Graph,
    *,
    solver: str = "euler",
    precision: str = "checkpoint",
    attention: str = "auto",
    sparse: str | None = None,
) -> Graph:
    """Every KSampler replaced, the models and their shift taken over, with ComfyUI's positions of motion frames.
    sparse: a preset of WanCore Sparse Attention."""
    made = deepcopy(graph)
    skipping = {} if sparse is None else {"skipping": ["sparse", 0]}
    if sparse is not None:
        custom = {"sparsity": 0.75, "dense_steps": 0.05, "ramp": 0.3, "dense_layers": 0, "mass": 0.0, "pooled": True}
        inputs = {"preset": sparse, **custom, "reuse": 1, "kernel": "auto"}
        made["sparse"] = {"class_type": "WanCoreSparseAttention", "inputs": inputs}
    for name, one in graph.items():
        if one["class_type"] != "KSampler":
            continue
        given = one["inputs"]
        own, motion = f"own {name}", f"motion {name}"
        how = {"model": given["model"], "precision": precision, "attention": attention, "residency": "auto"}
        made[own] = {"class_type": "WanCoreFromModel", "inputs": how}
        placed = {"positive": given["positive"], "positions": "comfyui"}
        made[motion] = {"class_type": "WanCoreMotionPositions", "inputs": placed}
        inputs = {
            "model": [own, 0], "positive": [motion, 0], "negative": given["negative"], "latent": given["latent_image"],
            "seed": given["seed"], "steps": given["steps"], "shift": 0.0, "boundary": 0.0,
            "guidance_high": given["cfg"], "guidance_low": given["cfg"], "solver": solver, "guidance_mode": "auto",
            "preset": "none", **skipping,
        }  # fmt: skip
        made[name] = {"class_type": "WanCoreSampler", "inputs": inputs}
    return made


def differences(templates: Templates, name: str) -> dict[str, float]:
    """Of every sampler's latents from the native run's, relative to those. Raises AssertionError where one does not
    run."""
    graph = comparable(templates.graph(name))
    for run in ("native", "own"):
        given = observed(graph, run)
        done = templates.server.run(with_own_samplers(given) if run == "own" else given)
        assert done.ok, f"{name}, {run}: {done.status}"
    found = {}
    for path in sorted((templates.base / "output").glob("native-*.pt")):
        pair = torch.load(path), torch.load(path.with_name("own" + path.name.removeprefix("native")))
        found[path.stem.removeprefix("native-")] = float((pair[1] - pair[0]).norm() / pair[0].norm())
    for path in (templates.base / "output").glob("*.pt"):
        path.unlink()
    return found
