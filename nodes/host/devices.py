"""Devices as ComfyUI chooses them."""

from __future__ import annotations

import torch
from comfy import model_management
from torch import Tensor


def device() -> torch.device:
    """Where models run."""
    return model_management.get_torch_device()


def vae_device() -> torch.device:
    """Where VAEs run: on the CPU with ComfyUI's option --cpu-vae."""
    return model_management.vae_device()


def vae_precision() -> str | None:
    """The precision that ComfyUI's options --fp16-vae, --bf16-vae and --fp32-vae name; None: none is given."""
    from comfy.cli_args import args  # reads the command line when it is imported

    return next((name for name in ("fp16", "bf16", "fp32") if getattr(args, f"{name}_vae")), None)


def to_intermediate(tensor: Tensor) -> Tensor:
    """Where ComfyUI keeps what travels between nodes: the CPU, unless it was told otherwise."""
    return tensor.to(model_management.intermediate_device())
