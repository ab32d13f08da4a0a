"""Run by ComfyUI's Python: tiny Wan models of its own classes with context windows, planned by WanCore and sampled by
ComfyUI's sampler. Prints one JSON object on its last line.

    python native_windows.py COMFYUI_PATH
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
native_models = importlib.import_module("native_models")

SEED, STEPS = 5, 4
FIRST = 2  # steps of the high-noise expert, where there are two
SIZE = (1, 16, 9, 4, 6)  # of latents
WINDOWS = {"context_length": 17, "context_overlap": 8, "context_schedule": "standard_static", "context_stride": 1,
           "closed_loop": False, "fuse_method": "pyramid", "freenoise": False}  # fmt: skip
UNIFORM, LOOPED = {"context_schedule": "standard_uniform"}, {"context_schedule": "looped_uniform"}
PLANS = {  # of T2V models
    "static": {},
    "uniform": UNIFORM,
    "uniform, every other frame too": {**UNIFORM, "context_length": 9, "context_overlap": 4, "context_stride": 2},
    "looped, two experts": {**LOOPED, "two": True},
    "static, a cache": {"cache": True},
    "uniform, a cache": {**UNIFORM, "cache": True},
    "one window": {"context_length": 33},
}


def planned_and_run(changed: dict[str, Any]) -> list[Any]:
    """Forwards as the plan preview says, with a latent and without, and as ComfyUI's samplers run them."""
    import comfy.sample
    import torch
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    from wan_core.config import SkipOptions, TaylorSeerOptions

    host = importlib.import_module("pack.nodes.host")
    ran = []  # of each forward whose blocks run, how many conditions it has
    changed = {**WINDOWS, **changed}
    cache, two = changed.pop("cache", False), changed.pop("two", False)
    models = [native_models.tiny("WAN21_T2V", seed) for seed in range(1 + two)]
    models = [WanContextWindowsManualNode.execute(model, **changed).result[0] for model in models]
    skipping, steps = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, order=1, retention=0.2)), 4 * STEPS
    if cache:
        models = [host.accelerate(model, "comfyui", skipping, lambda line: None) for model in models]
    how = {"cfg": 3.0, "sampler_name": "euler", "scheduler": "simple"}
    latent = {"samples": torch.zeros(SIZE)}
    low = {"model_low": models[1], "split_step": FIRST} if two else {}
    texts = [
        native_models.planned(models[0], steps, **how, seconds_per_forward=1.0, latent=one, **low)[1].splitlines()
        for one in (latent, None)
    ]  # fmt: skip
    for model in models:
        first = model.model.diffusion_model.blocks[0].self_attn
        first.register_forward_pre_hook(lambda _, inputs: ran.append(len(inputs[0])))
    positive, negative = native_models.conditions({})
    parts = [{"start_step": 0, "last_step": FIRST}, {"start_step": FIRST, "last_step": steps}] if two else [{}]
    for model, part in zip(models, parts, strict=True):
        noise = comfy.sample.prepare_noise(latent["samples"], SEED)
        comfy.sample.sample(
            model, noise, steps, positive=positive, negative=negative, latent_image=latent["samples"], seed=SEED,
            disable_pbar=True, **how, **part,
        )  # fmt: skip
    return [*texts, sum(ran)]


def main(checkout: str) -> None:
    native_models.set_up(checkout)
    importlib.import_module("pack.nodes.native_model")
    plans = {name: planned_and_run(changed) for name, changed in PLANS.items()}
    print(json.dumps({"plans": plans}))


if __name__ == "__main__":
    main(sys.argv[1])
