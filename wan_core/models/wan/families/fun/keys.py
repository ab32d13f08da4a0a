"""The names of parameters of Fun control and camera on disk, beside those of image-to-video.

Source: VideoX-Fun/videox_fun/models/wan_transformer3d.py, wan_camera_adapter.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from wan_core.models.wan.families.wan.keys import official_names
from wan_core.models.wan.families.wan.keys import parameter_names as wan_parameter_names

_REFERENCE = re.compile(r"ref_conv\.(weight|bias)")
_ADAPTER = re.compile(r"control_adapter\.(?:conv|residual_blocks\.(?P<number>0|[1-9]\d?)\.conv[12])\.(?:weight|bias)")


def control_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout of Fun control, which is ComfyUI's too."""
    return _beside([name for name in names if _REFERENCE.fullmatch(name)], names)


def camera_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout of Fun camera, which is ComfyUI's too."""
    return _beside([name for name in names if _ADAPTER.fullmatch(name)], names)


def _beside(own: Collection[str], names: Collection[str]) -> dict[str, str] | None:
    if not own:
        return None
    main = official_names([name for name in names if name not in own])
    return None if main is None else {**main, **{name: name for name in own}}


def residual_blocks(names: Collection[str]) -> int:
    """How many residual blocks the adapter of the camera has."""
    numbers = (match["number"] for name in names if (match := _ADAPTER.fullmatch(name)))
    return max((int(number) + 1 for number in numbers if number is not None), default=0)


def control_parameter_names(found: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of Fun control."""
    return [*wan_parameter_names(found, num_layers), "ref_conv.weight", "ref_conv.bias"]


def camera_parameter_names(found: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of Fun camera."""
    convs = ["conv", *(f"residual_blocks.{n}.conv{i}" for n in range(max(1, residual_blocks(found))) for i in (1, 2))]
    own = [f"control_adapter.{conv}.{kind}" for conv in convs for kind in ("weight", "bias")]
    return [*wan_parameter_names(found, num_layers), *own]
