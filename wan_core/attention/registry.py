"""Attention backends by name: what each needs, whether it can run here, and the one that `auto` takes.

A name resolves once, when a pipeline is set up. After that nothing falls back: a backend that cannot run raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wan_core.config import UserError

log = logging.getLogger(__name__)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionError(UserError):
    """An attention backend that does not exist or cannot run here; says which can."""


@dataclass(frozen=True)
class Backend:
    """`why_not` returns None where the backend runs, else the reason and what to do. `load` imports what it needs."""

    name: str
    summary: str
    why_not: Callable[[torch.device, torch.dtype], str | None]
    load: Callable[[], Attend]


def _load(function: str) -> Callable[[], Attend]:
    def load() -> Attend:
        from wan_core.attention import sdpa

        return getattr(sdpa, function)

    return load


def _anywhere(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def _cudnn_why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "needs an NVIDIA GPU"
    if torch.version.cuda is None or not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN: install a CUDA build of torch"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or newer"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 or fp16, not in {str(dtype).removeprefix('torch.')}: use sdpa, or --precision bf16"
    return None


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("sdpa", "torch's scaled_dot_product_attention, torch chooses the kernel", _anywhere, _load("sdpa")),
        Backend("cudnn", "cuDNN's fused attention through torch", _cudnn_why_not, _load("cudnn")),
        Backend(
            "math",
            "the formula in float32, the whole matrix in memory: for tests",
            _anywhere,
            _load("math_reference"),
        ),
    )
}
AUTO_ORDER = ("cudnn", "sdpa")


def resolve_attention(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[str, Attend]:
    """The backend called `name` for `dtype` on `device`; `auto` takes the first of `AUTO_ORDER` that runs, and logs it.

    Raises AttentionError for an unknown name (listing the known ones) or a backend that cannot run here (saying why).
    """
    if name == "auto":
        name = next(n for n in AUTO_ORDER if BACKENDS[n].why_not(device, dtype) is None)
        log.info("attention: %s (%s)", name, BACKENDS[name].summary)
    backend = BACKENDS.get(name)
    if backend is None:
        raise AttentionError(f"attention backend {name!r} is not known; use one of: auto, {', '.join(BACKENDS)}")
    reason = backend.why_not(device, dtype)
    if reason is not None:
        raise AttentionError(
            f"attention backend {name!r} cannot run on {device}: {reason}. `python -m wan_core doctor` lists what can."
        )
    return name, backend.load()
