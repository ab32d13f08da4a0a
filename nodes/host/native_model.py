"""What ComfyUI's own Wan models are, in the engine's terms: architecture, task, file and shift."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.samplers import KSampler
from torch import Tensor

from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import choose_task
from wan_core.models.wan.families.task import Clues
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


def sampler_sigmas(patcher: ModelPatcher, sampler: str, scheduler: str, steps: int, denoise: float) -> Tensor:
    """The sigmas with which ComfyUI's KSampler would run this model."""
    return KSampler(patcher, steps, torch.device("cpu"), sampler, scheduler, denoise).sigmas


def window_schedule(model_options: dict[str, Any]) -> str | None:
    """The name of the schedule of ComfyUI's context windows; None where there are none."""
    handler = model_options.get("context_handler")
    return None if handler is None else getattr(getattr(handler, "context_schedule", None), "name", "unknown")
