"""INT8 and 4-bit matrices of ComfyUI's files: what a description (`comfy_quant`) and the parts of a matrix say.

See `kernels.integer_weights` for the formats. A description has its parameters beside the format or under "params".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wan_core.checkpoint.opened import TensorInfo
from wan_core.ops.kernels.formats import FP8
from wan_core.ops.kernels.integer_weights import IntegerFormat, integer_format, is_rotation

ROTATION = 256  # columns, where a rotated matrix does not say
GROUP = 16  # numbers that share a scale in asym_w4a8_int8, where it does not say
_BYTE = (torch.int8, torch.uint8)
PARTS = {
    "int8_tensorwise": ("weight_scale",),
    "convrot_w4a4": ("weight_scale",),
    "asym_w4a8_int8": ("weight_s_rel", "weight_s_channel"),
}
OPTIONAL = {"asym_w4a8_int8": ("weight_codebook",)}


def described_format(entry: Mapping[str, object]) -> IntegerFormat:
    """The format that a description gives. Raises ValueError: what is wrong with it."""
    nested = entry.get("params")
    parameters = {**(nested if isinstance(nested, Mapping) else {}), **entry}
    name = str(entry.get("format"))
    numbers = {"convrot_groupsize": ROTATION, "group_size": GROUP}
    for key, default in numbers.items():
        value = parameters.get(key, default)
        if not isinstance(value, int) or not 0 < value <= 1 << 20:
            raise ValueError(f"its {key} is {str(value)[:40]!r}, and a positive number is expected")
        numbers[key] = value
    rotation, group = numbers["convrot_groupsize"], numbers["group_size"]
    if name == "int8_tensorwise" and not parameters.get("convrot", False):
        rotation = 0
    if rotation and not is_rotation(rotation):
        raise ValueError(f"it is rotated in groups of {rotation} columns, and only powers of 4 are possible")
    if name == "asym_w4a8_int8" and (group < 4 or (16 % group and group % 16)):
        raise ValueError(f"groups of {group} numbers share a scale; 4, 8 and multiples of 16 are possible")
    inputs = parameters.get("linear_dtype", "int4")
    if name == "convrot_w4a4" and inputs not in ("int4", "int8"):
        raise ValueError(f"its linear_dtype is {str(inputs)[:40]!r}; int4 and int8 are possible")
    return IntegerFormat(
        name,
        rotation,
        group if name == "asym_w4a8_int8" else 0,
        int4=name == "convrot_w4a4" and inputs == "int4",
        wide=bool(parameters.get("full_precision_matrix_mult", False)),
    )


def matrix_shape(fmt: IntegerFormat, parts: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
    """The shape [N, K] of a matrix; None if its parts do not match."""
    weight = parts["weight"]
    if len(weight.shape) != 2 or 0 in weight.shape or weight.dtype not in _BYTE:
        return None
    n, k = weight.shape[0], weight.shape[1] * fmt.numbers_in_byte
    if k % (fmt.rotation or 1) or k % (fmt.group or 1) or (fmt.numbers_in_byte == 2 and k % 16):
        return None
    rows = {(n,), (n, 1)}
    allowed: dict[str, set[tuple[int, ...]]] = {
        "weight_scale": rows | ({(), (1,), (1, 1)} if fmt.name == "int8_tensorwise" else set()),
        "weight_s_rel": {(n, k // (fmt.group or 1))},
        "weight_s_channel": rows,
        "weight_codebook": {(16,)},
    }
    for name, shapes in allowed.items():
        if name not in parts:
            continue
        number = parts[name].dtype.is_floating_point or (name == "weight_s_rel" and parts[name].dtype == torch.uint8)
        if parts[name].shape not in shapes or not number:
            return None
    return n, k


def read_parts(text: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of a matrix of format `text` as `integer_weights` takes them."""
    fmt = integer_format(text)
    assert fmt is not None
    parts = {"weight": stored["weight"].view(torch.int8)}
    for name, value in stored.items():
        if name == "weight_s_rel":
            parts[name] = value.view(FP8) if value.dtype == torch.uint8 else value
        elif name != "weight":
            parts[name] = value.float().reshape(-1)
    return parts
