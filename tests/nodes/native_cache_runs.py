"""For `native_caches`: models with a step cache, policies, samplers, and the engine's own run with the same weights."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import native_models as world

SIZE = (1, 16, 3, 4, 6)  # of latents
EULER = [1.0, 0.97, 0.93, 0.9, 0.85, 0.8, 0.7, 0.6, 0.45, 0.3, 0.15, 0.0]


class World:
    """Models, caches put on them, and what was reported."""

    def __init__(self, pack: types.ModuleType) -> None:
        import comfy.model_patcher

        self.pack = pack
        self.cache = importlib.import_module("pack.nodes.host.native_cache")
        self.native_run = importlib.import_module("pack.nodes.host.native_run")
        self.accelerate = self.native_run.accelerate
        self.patcher = comfy.model_patcher.ModelPatcher
        self.said: list[str] = []
        self.free_memory = self.patcher.get_free_memory

    def cached(self, model: Any, whole: Any = None, **policy: Any) -> Any:
        from wan_core.config import SkipOptions

        options = SkipOptions(**policy)
        return self.accelerate(model, "comfyui", options, self.said.append, whole)

    @contextmanager
    def guidance(self, batched: bool) -> Iterator[None]:
        """Whether ComfyUI has memory for both prompts in one forward."""
        self.patcher.get_free_memory = lambda *_: 1 << 60 if batched else 0
        try:
            yield
        finally:
            self.patcher.get_free_memory = self.free_memory

    @contextmanager
    def runs(self) -> Iterator[list[Any]]:
        """The cached runs that are made inside."""
        real, runs = self.cache.CachedRun, []
        self.native_run.CachedRun = lambda *arguments: runs.append(real(*arguments)) or runs[-1]
        try:
            yield runs
        finally:
            self.native_run.CachedRun = real

    def counts(self) -> tuple[int, int]:
        """Skipped and all forwards of the last run."""
        fields = self.said[-1].split("): ", 1)[1].split()
        return int(fields[0]), int(fields[2])


def policies() -> dict[str, dict[str, Any]]:
    from wan_core.config import TaylorSeerOptions

    return {
        "careful": {"taylorseer": TaylorSeerOptions(interval=2, retention=0.4)},
        "taylorseer": {"taylorseer": TaylorSeerOptions(interval=2, retention=0.1)},
    }


def every_second() -> dict[str, Any]:
    from wan_core.config import TaylorSeerOptions

    return {"taylorseer": TaylorSeerOptions(interval=2, retention=0.1)}


def never() -> list[dict[str, Any]]:
    from wan_core.config import TaylorSeerOptions

    return [
        {"taylorseer": TaylorSeerOptions(interval=1)},
    ]


def sample(
    model: Any, sigmas: list[float], extra: dict[str, Any] | None = None, latent: Any = None, **changed: Any
) -> Any:
    """The steps of `sigmas`, from noise or from `latent`."""
    import comfy.sample
    import comfy.samplers
    import torch

    how = {"sampler": "euler", "size": SIZE, "cfg": 3.0, "callback": None, "noise_mask": None, **changed}
    positive, negative = world.conditions(extra or {})
    noise = world.rows(*how["size"], seed=9) if latent is None else torch.zeros_like(latent)
    start = torch.zeros_like(noise) if latent is None else latent
    with torch.inference_mode():
        return comfy.sample.sample_custom(
            model, noise, how["cfg"], comfy.samplers.sampler_object(how["sampler"]), torch.tensor(sigmas),
            positive, negative, start, disable_pbar=True, seed=0, callback=how["callback"],
            noise_mask=how["noise_mask"],
        )  # fmt: skip


def engine(model: Any, seed: int) -> Any:
    """The engine's model with the weights of a native one."""
    from wan_core.models.wan.config import DiTConfig
    from wan_core.models.wan.model import WanModel

    small = {name: value for name, value in world.SMALL.items() if name != "in_dim"}
    transformer = WanModel(DiTConfig(in_channels=16, out_channels=16, **small)).eval()
    transformer.load_state_dict(model.model.diffusion_model.state_dict())
    return transformer


def ours(models: dict[str, Any], sigmas: list[float], boundary: float, policy: dict[str, Any]) -> tuple[Any, Any]:
    """The engine's latents and its plan, for the same sigmas, prompts and noise."""
    import torch

    from wan_core.config import SkipOptions
    from wan_core.sampling.cache.curves import find_curve
    from wan_core.sampling.cache.skipping import leave_out
    from wan_core.sampling.conditioning import Conditioning
    from wan_core.sampling.denoise import Ready, denoise
    from wan_core.sampling.plan import make_plan
    from wan_core.sampling.steps import Step

    steps = tuple(
        Step(index=i, timestep=1000 * s, sigma=s, sigma_next=sigmas[i + 1], expert="high" if s >= boundary else "low",
             guidance=3.0, branches=("cond", "uncond"))
        for i, s in enumerate(sigmas[:-1])
    )  # fmt: skip
    plan = replace(make_plan(task="t2v-A14B", solver="euler"), boundary=boundary, steps=steps)
    plan = leave_out(plan, SkipOptions(**policy), find_curve(None, "t2v-A14B"))
    ran: list[int] = []
    conditioning = Conditioning(cond=padded(world.rows(1, 6, 32, seed=2)), uncond=padded(world.rows(1, 6, 32, seed=3)))
    with torch.inference_mode():
        noise = world.rows(*SIZE, seed=9)
        latents = denoise(
            plan, Ready(models.__getitem__), conditioning, noise, on_step=lambda p: ran.append(p.forwards)
        )
    return latents, (2 * len(steps) - sum(ran), 2 * len(steps))


def padded(rows: Any) -> Any:
    import torch

    return torch.nn.functional.pad(rows, (0, 0, 0, 512 - rows.shape[1]))


def native_conditions(_: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return [[padded(world.rows(1, 6, 32, seed=2)), {}]], [[padded(world.rows(1, 6, 32, seed=3)), {}]]


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    error = world.error(actual, expected)
    assert error <= tolerance, f"error {error:.2e}"
