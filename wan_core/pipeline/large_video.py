"""Videos far larger than any model was trained on, and those of which not even one tensor fits into memory."""

from __future__ import annotations

import math

import torch

from wan_core.config import OptionError
from wan_core.config.host_memory import total_bytes
from wan_core.execution.report import GIB
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.tasks import TASKS, Task

BEYOND = 2.0  # times the pixels of the largest size in training: from there on content is repeated or falls apart


def size_notes(task: Task | None, vae: VAEConfig, width: int, height: int) -> list[str]:
    """A sentence where a picture is far larger than what models whose latents are of `vae` were trained on. task: None
    where it is not known. The embedded model knows sizes of its own (`wan_core.pipeline.embedded`)."""
    if task is not None and task.release == "embedded":
        return []
    trained = [task for task in TASKS.values() if task.vae.z_dim == vae.z_dim]
    largest = max(trained, key=lambda task: task.width * task.height)
    times = width * height / (largest.width * largest.height)
    if times <= BEYOND:
        return []
    return [
        f"{width}x{height} has {times:.3g} times the pixels of {largest.width}x{largest.height}, the largest size that "
        f"models with these latents were trained on, and attention takes {times**2:.3g} times as long. Choose a "
        "smaller size, and enlarge the video afterwards"
    ]


def check_tensor(what: str, shape: tuple[int, ...], itemsize: int, device: torch.device) -> None:
    """Raise OptionError where one tensor of a video, called `what`, takes more than all memory of the device."""
    size, room = math.prod(shape) * itemsize, memory_of(device)
    if room is not None and size > room:
        raise OptionError(
            f"{what} of this video ({' x '.join(map(str, shape))}) alone would take {size / GIB:.3g} GiB of the "
            f"{room / GIB:.3g} that there are: choose a smaller size or fewer frames"
        )


def memory_of(device: torch.device) -> int | None:
    """All memory of a device in bytes, used or not; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return total_bytes() if device.type == "cpu" else None
