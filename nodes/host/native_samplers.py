"""How often ComfyUI's samplers evaluate a model, and where: they are walked with a stand-in in the model's place."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

OWN = "comfy."  # names of ComfyUI's modules begin so
UNSTEADY = ("dpm_adaptive",)  # samplers whose evaluations depend on what the model returns


class StandIn:
    """What k-diffusion's functions call a model. It halves its input, and notes the sigmas."""

    def __init__(self, patcher: ModelPatcher, sigmas: Tensor) -> None:
        inner = SimpleNamespace(model_sampling=patcher.get_model_object("model_sampling"))
        self.inner_model = SimpleNamespace(model_patcher=patcher, inner_model=inner)
        self.sigmas = sigmas
        self.seen: list[float] = []
        self.both = False

    def __call__(self, x: Tensor, sigma: Tensor, model_options: Any = None, **_: Any) -> Tensor:
        options = model_options or {}
        self.seen.append(float(sigma[0]))
        self.both = self.both or bool(options.get("disable_cfg1_optimization", False))
        video = x / 2
        for function in options.get("sampler_post_cfg_function", ()):  # the sampler's own
            video = function({"denoised": video, "uncond_denoised": video, "cond_denoised": video, "sigma": sigma})
        return video


def evaluations(patcher: ModelPatcher, sampler: str, sigmas: Sequence[float]) -> tuple[list[float] | None, bool]:
    """The sigmas at which a sampler evaluates a model over steps with `sigmas`, None where that is not known, and
    whether it runs the negative prompt whatever the scale of guidance is."""
    from comfy.samplers import sampler_object

    chosen = sampler_object(sampler)
    if sampler in UNSTEADY or not chosen.sampler_function.__module__.startswith(OWN):
        return None, False
    own = torch.tensor(sigmas)
    model = StandIn(patcher, own)
    with torch.random.fork_rng(devices=[]):
        chosen.sampler_function(
            model, torch.ones(1, 1, 1, 1, 1), own, {"seed": 0}, callback=None, disable=True, **chosen.extra_options
        )
    return model.seen, model.both
