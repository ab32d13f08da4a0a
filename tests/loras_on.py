"""The LoRAs of models that a test changes, held beside them as a loader of models would hold them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from wan_core.models.wan.model import WanModel
from wan_core.pipeline.applied_loras import ModelLoras
from wan_core.pipeline.loras import Wanted

_OF: WeakKeyDictionary[nn.Module, ModelLoras] = WeakKeyDictionary()


def loras_on(model: nn.Module, device: torch.device | None = None, merged: Sequence[Wanted] = ()) -> ModelLoras:
    """Made when first asked for. device: None is where the weights are. merged: summed in when `model` was read."""
    if model not in _OF:
        assert isinstance(model, WanModel)
        _OF[model] = ModelLoras(model.patch_embedding.weight.device if device is None else device, merged)
    return _OF[model]
