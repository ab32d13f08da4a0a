"""The tasks of all families: what checkpoints were trained for, by name. Imports no torch."""

from __future__ import annotations

from wan_core.config.checks import OptionError, unknown
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.families.family import Task

__all__ = ["TASKS", "Task", "find_task", "image_task"]

TASKS: dict[str, Task] = {task.name: task for family in FAMILIES.values() for task in family.tasks}


def find_task(name: str) -> Task:
    """The task called `name`, any case. Raises OptionError listing the known ones."""
    for known, task in TASKS.items():
        if known.lower() == name.lower():
            return task
    raise unknown("task", name, TASKS)


def image_task(latent_channels: int) -> Task:
    """The first task that takes an image and works on latents of so many channels: where only the VAE is known. Raises
    OptionError."""
    for task in TASKS.values():
        if task.image != "none" and not task.driven_by and task.vae.z_dim == latent_channels:
            return task
    raise OptionError(
        f"no image-to-video model works on latents of {latent_channels} channels: use the model's own VAE"
    )
