"""From the shapes of a file of Fun to its architecture, and to its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wan_core.config.checks import OptionError, UserError
from wan_core.models.wan.config import T2V_1_3B, DiTConfig
from wan_core.models.wan.families.family import Choice, Clues, Shapes, Task
from wan_core.models.wan.families.fun.config import UNSHUFFLED, FunCameraConfig, FunControlConfig, fields_of
from wan_core.models.wan.families.fun.keys import residual_blocks
from wan_core.models.wan.families.fun.tasks import CAMERA_TASKS, CONTROL_TASKS
from wan_core.models.wan.families.shapes import shape_of
from wan_core.models.wan.families.wan.recognise import read_config


def read_control(shapes: Shapes, metadata: Mapping[str, str]) -> FunControlConfig:
    """The transformer that official `shapes` describe. Raises UserError."""
    wan = read_config(shapes, metadata)
    _check(wan, (3 * wan.out_channels, 3 * wan.out_channels + 4), "Fun control")
    return FunControlConfig(**fields_of(wan), reference_channels=shape_of(shapes, "ref_conv.weight", 4)[1])


def read_camera(shapes: Shapes, metadata: Mapping[str, str]) -> FunCameraConfig:
    """The transformer that official `shapes` describe. Raises UserError."""
    wan = read_config(shapes, metadata)
    _check(wan, (2 * wan.out_channels, 2 * wan.out_channels + 4), "Fun camera")
    channels = shape_of(shapes, "control_adapter.conv.weight", 4)[1]
    if channels % UNSHUFFLED**2:
        raise UserError(f"its adapter of the camera takes {channels} channels, no multiple of {UNSHUFFLED**2}.")
    blocks = max(1, residual_blocks(shapes))
    return FunCameraConfig(**fields_of(wan), camera_channels=channels // UNSHUFFLED**2, residual_blocks=blocks)


def _check(wan: DiTConfig, channels: tuple[int, int], kind: str) -> None:
    if wan.in_channels not in channels or wan.patch_size[0] != 1:
        raise UserError(
            f"a transformer of {wan.in_channels} input channels and patches of {wan.patch_size[0]} frames is none of "
            f"{kind}, which takes {channels[0]} or {channels[1]} channels and patches of one frame"
        )


def choose_control(dit: DiTConfig, clues: Clues) -> Choice:
    return _choose(dit, clues, CONTROL_TASKS)


def choose_camera(dit: DiTConfig, clues: Clues) -> Choice:
    return _choose(dit, clues, CAMERA_TASKS)


def _choose(dit: DiTConfig, clues: Clues, tasks: Sequence[Task]) -> Choice:
    """The released task of this architecture. Raises OptionError where there is none, or a second file too much."""
    for task in tasks:
        small = task.full_size is not None and task.full_size.dim == T2V_1_3B.dim
        if (task.in_channels, task.image_dim, small) == (dit.in_channels, dit.image_dim, dit.dim == T2V_1_3B.dim):
            if not clues.alone and not task.two_experts:
                raise OptionError(f"{task.name} is one transformer for all steps: leave the second file out")
            return Choice(task)
    features = "no CLIP features" if dit.image_dim is None else f"CLIP features {dit.image_dim} wide"
    raise OptionError(
        f"a transformer of Fun of {dit.in_channels} input channels and {features} belongs to no known task; name one "
        f"with --task: {', '.join(task.name for task in tasks)}"
    )
