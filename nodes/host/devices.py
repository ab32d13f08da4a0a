"""Devices as ComfyUI chooses them."""

from __future__ import annotations

import torch
from comfy import model_management
from torch import Tensor


def device() -> torch.device:
    """Where models run."""
    return model_management.get_torch_device()


def to_intermediate(tensor: Tensor) -> Tensor:
    """Where ComfyUI keeps what travels between nodes: the CPU, unless it was told otherwise."""
    return tensor.to(model_management.intermediate_device())
