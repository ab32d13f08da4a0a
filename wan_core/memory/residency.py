"""Which models are on the device: all of them, or one at a time.

`resident` keeps everything on the device. `swap` keeps weights in host memory (for a file on disk: its mapping, so
the page cache) and holds only the model in use; leaving costs nothing, because the host's copy was never given up.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Policy = Literal["resident", "swap"]
GIB = 1024**3


def choose_residency(mode: str, device: torch.device, weights: int, activations: int) -> tuple[Policy, str]:
    """The policy and why, in words for the report. `weights` and `activations` in bytes, all models and the largest
    phase."""
    if mode in ("resident", "shard") or device.type != "cuda":
        return "resident", "asked for" if mode in ("resident", "shard") else "weights stay in host memory on a CPU"
    if mode == "swap":
        return "swap", "asked for"
    free, _ = torch.cuda.mem_get_info(device)
    need = f"weights {weights / GIB:.1f} + activations {activations / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
    return (
        ("resident", need) if weights + activations <= free else ("swap", f"{need}: one model at a time on the device")
    )


class Residency:
    """Named models under one policy. `use` returns a model on the device and may send others away."""

    def __init__(self, device: torch.device, policy: Policy) -> None:
        self.device = device
        self.policy: Policy = policy
        self.models: dict[str, nn.Module] = {}
        self.host: dict[str, dict[str, Tensor]] = {}  # the host tensors of each swapped model, by name

    @property
    def load_device(self) -> torch.device:
        """Where a loader should put weights: straight on the device if they stay there."""
        return self.device if self.policy == "resident" else torch.device("cpu")

    def add(self, name: str, model: nn.Module) -> None:
        self.models[name] = model
        if self.policy == "swap":
            self.host[name] = {n: t.data for n, t in tensors_of(model).items()}

    def use(self, name: str) -> nn.Module:
        """The model, on the device. Under `swap`, every other model leaves first."""
        model = self.models[name]
        if self.policy == "swap":
            for other in self.models:
                if self.models[other] is not model:
                    self.release(other)
            for tensor in tensors_of(model).values():
                tensor.data = tensor.data.to(self.device, non_blocking=True)
        return model

    def release(self, name: str) -> None:
        """Give the device memory of a swapped model back."""
        for tensor_name, tensor in tensors_of(self.models[name]).items() if self.policy == "swap" else ():
            tensor.data = self.host[name][tensor_name]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
