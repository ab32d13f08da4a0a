"""Run by ComfyUI's Python: guiders that call a model several times in a step, and models computed in another dtype,
with step caching on tiny Wan models of ComfyUI's own classes. `native_checks` runs its checks.
"""

from __future__ import annotations

import importlib
from typing import Any

import native_models as world
from native_cache_runs import EULER, SIZE, World, close, every_second, policies, sample


def guided(guider: Any, sigmas: list[float], size: tuple[int, ...] = SIZE) -> Any:
    """The latents that a guider of ComfyUI samples."""
    import comfy.samplers
    import torch

    with torch.inference_mode():
        noise, sampler = world.rows(*size, seed=9), comfy.samplers.sampler_object("euler")
        return guider.sample(noise, torch.zeros(size), sampler, torch.tensor(sigmas), disable_pbar=True, seed=0)


def guiders(model: Any) -> dict[str, Any]:
    """Guiders that call a model for three prompts, or in several batches, and give what plain guidance of 3 gives."""
    from comfy_extras.nodes_custom_sampler import CFGGuider, DualCFGGuider
    from comfy_extras.nodes_perpneg import PerpNeg, PerpNegGuider

    positive, negative = world.conditions({})
    results = {
        "plain": CFGGuider.execute(model, positive, negative, 3.0),
        "dual": DualCFGGuider.execute(model, positive, negative, negative, 3.0, 5.0, "regular"),
        "nested": DualCFGGuider.execute(model, positive, negative, negative, 3.0, 1.0, "nested"),
        "perp-neg": PerpNegGuider.execute(model, positive, positive, negative, 3.0, 0.0),
        "perp-neg, old": CFGGuider.execute(
            PerpNeg.execute(model, negative, 0.0).result[0], positive, world.conditions({})[0], 3.0
        ),
    }
    return {name: one.result[0] for name, one in results.items()}


def check_guiders(it: World) -> None:
    """With a step cache they give what plain guidance gives with it."""
    model = world.tiny("WAN21_T2V")
    by_name = guiders(it.cached(model, **every_second()))
    wanted = guided(by_name.pop("plain"), EULER)
    for name, guider in by_name.items():
        for batched in (True, False):
            with it.guidance(batched):
                close(guided(guider, EULER), wanted, 1e-5)
            skipped, forwards = it.counts()
            assert skipped / forwards == 10 / 22, (name, batched, it.said[-1])
    assert world.error(wanted, guided(guiders(model)["plain"], EULER)) > 1e-3, "skipping must show"


def check_dtype(it: World) -> None:
    """ModelComputeDtype before the node: its dtype is that of the blocks, of kernels and of what is kept."""
    import torch
    from comfy_extras.nodes_model_advanced import ModelComputeDtype

    host = importlib.import_module("pack.nodes.host")
    accelerate = importlib.import_module("pack.nodes.accelerate")
    real, asked = accelerate.resolve_attention, []
    accelerate.resolve_attention = lambda name, *place: asked.append(place[1]) or real(name, *place)
    try:
        for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32, "default": torch.float32}.items():
            model = ModelComputeDtype().patch(world.tiny("WAN21_T2V"), name)[0]
            seen: set[Any] = set()
            block = model.model.diffusion_model.blocks[1]
            handle = block.register_forward_pre_hook(lambda _, args, seen=seen: seen.add(args[0].dtype))
            accelerate.WanCoreAccelerate.execute(model, "exact", "auto")
            with it.runs() as runs:
                sample(it.cached(model, **policies()["taylorseer"]), EULER)
            handle.remove()
            assert seen == {dtype} == {host.compute_dtype(model)} == {asked.pop()}, (name, seen)
            assert runs[0].most == 2 * 2 * 18 * 48 * dtype.itemsize, (name, runs[0].most)
    finally:
        accelerate.resolve_attention = real
