"""What ComfyUI's own Wan models are, in the engine's terms: architecture, task, file and shift; and how often ComfyUI's
samplers evaluate a model, and where."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.samplers import KSampler
from torch import Tensor

from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import choose_task
from wan_core.models.wan.families.family import Clues
from wan_core.sampling.native.plan import NativeModel

from .native import check_wan, checkpoint_of

IMAGE_DIM = 1280  # of the CLIP features that an image-to-video model of Wan 2.1 takes
STATEFUL = ("CausalWanModel",)  # keep keys and values between forwards: no forward can be left out


def describe(patcher: ModelPatcher) -> NativeModel:
    """Raises OptionError for what is no Wan model."""
    dit = check_wan(patcher)
    config = DiTConfig(
        in_channels=dit.in_dim,
        out_channels=dit.out_dim,
        dim=dit.dim,
        ffn_dim=dit.ffn_dim,
        num_heads=dit.num_heads,
        num_layers=dit.num_layers,
        text_dim=dit.text_dim,
        text_len=dit.text_len,
        freq_dim=dit.freq_dim,
        patch_size=tuple(dit.patch_size),
        eps=dit.eps,
        image_dim=None if dit.img_emb is None else IMAGE_DIM,
    )
    path, variant, task, note = checkpoint_of(patcher), type(dit).__name__, None, ""
    if variant == "WanModel" and dit.ref_conv is None:
        with suppress(OptionError):  # of a control model: its channels belong to no task of the engine
            task, note = choose_task(config, Clues(path=path))
    sampling = patcher.get_model_object("model_sampling")
    return NativeModel(variant, config, task, path, float(getattr(sampling, "shift", 1.0)), note)


def sampler_names() -> list[str]:
    return list(KSampler.SAMPLERS)


def scheduler_names() -> list[str]:
    return list(KSampler.SCHEDULERS)


def sampler_sigmas(patcher: ModelPatcher, sampler: str, scheduler: str, steps: int, denoise: float) -> Tensor:
    """The sigmas with which ComfyUI's KSampler would run this model."""
    return KSampler(patcher, steps, torch.device("cpu"), sampler, scheduler, denoise).sigmas


def window_schedule(model_options: dict[str, Any]) -> str | None:
    """The name of the schedule of ComfyUI's context windows; None where there are none."""
    handler = model_options.get("context_handler")
    return None if handler is None else getattr(getattr(handler, "context_schedule", None), "name", "unknown")


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
