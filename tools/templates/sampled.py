"""Official templates with WanCore Sampler in the place of ComfyUI's, beside the native run of the same graph.

Both take Euler's steps: ComfyUI's UniPC is another solver than the reference's. Scheduler `simple` has the sigmas of
WanCore's `euler` where the steps divide 1000.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.comfyui import Graph
from tools.templates.run import Templates, observed

FROM_MODEL = {"precision": "checkpoint", "attention": "auto", "residency": "auto"}


def comparable(graph: Graph) -> Graph:
    """The graph with Euler's steps, and with a sound that never changes: ComfyUI has no copies of its first frame in
    front, so that its tokens hear other frames."""
    made = deepcopy(graph)
    for one in made.values():
        if one["class_type"] == "KSampler":
            one["inputs"]["sampler_name"] = "euler"
        elif one["class_type"] == "StandInAudio":
            one["inputs"]["steady"] = True
    return made


def with_own_samplers(graph: Graph) -> Graph:
    """Every KSampler replaced, the models and their shift taken over, with ComfyUI's positions of motion frames."""
    made = deepcopy(graph)
    for name, one in graph.items():
        if one["class_type"] != "KSampler":
            continue
        given = one["inputs"]
        own, motion = f"own {name}", f"motion {name}"
        made[own] = {"class_type": "WanCoreFromModel", "inputs": {"model": given["model"], **FROM_MODEL}}
        placed = {"positive": given["positive"], "positions": "comfyui"}
        made[motion] = {"class_type": "WanCoreMotionPositions", "inputs": placed}
        inputs = {
            "model": [own, 0], "positive": [motion, 0], "negative": given["negative"], "latent": given["latent_image"],
            "seed": given["seed"], "steps": given["steps"], "shift": 0.0, "boundary": 0.0, "guidance_high": given["cfg"],
            "guidance_low": given["cfg"], "solver": "euler", "guidance_mode": "auto", "preset": "none",
        }  # fmt: skip
        made[name] = {"class_type": "WanCoreSampler", "inputs": inputs}
    return made


def differences(templates: Templates, name: str, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Of every sampler's latents from the native run's, relative to those. weights: of the transformer. Raises
    AssertionError where one does not run."""
    graph = comparable(templates.graph(name))
    for file in {one["inputs"]["unet_name"] for one in graph.values() if one["class_type"] == "UNETLoader"}:
        save_file(dict(weights), templates.base / "models" / "diffusion_models" / file)
    native = observed(graph, "native")
    kept = {key: one for key, one in observed(graph, "own").items() if one["class_type"] == "KeepLatent"}
    own = {key: one for key, one in with_own_samplers(native).items() if one["class_type"] != "KeepLatent"} | kept
    for run, given in (("native", native), ("own", own)):
        done = templates.server.run(given)
        assert done.ok, f"{name}, {run}: {done.status}"
    found = {}
    for path in sorted((templates.base / "output").glob("native-*.pt")):
        pair = torch.load(path), torch.load(path.with_name("own" + path.name.removeprefix("native")))
        found[path.stem.removeprefix("native-")] = float((pair[1] - pair[0]).norm() / pair[0].norm())
    for path in (templates.base / "output").glob("*.pt"):
        path.unlink()
    return found
