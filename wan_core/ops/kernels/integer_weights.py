"""INT8 and 4-bit weights as ComfyUI stores them, rotated (ConvRot) or not, in plain torch.

| format | numbers | scales |
|---|---|---|
| int8_tensorwise | int8 [N, K] | `weight_scale` float32, one or [N, 1] |
| convrot_w4a4 | int4, two to a byte, the first in the low half | `weight_scale` float32 [N] |
| asym_w4a8_int8 | 4 bits, packed alike: an index into `weight_codebook` [16], or 0 to 15 for -8 to 7 | see below |

The scales of asym_w4a8_int8 are `weight_s_rel`, E4M3 of groups of numbers [N, K / group], and `weight_s_channel`,
float32 [N].

Rotation: in groups of columns, the weight and the activations are multiplied by a Hadamard matrix H, which is
orthogonal and symmetric. So (x H)(W H)^T = x W^T, and outliers of a channel are spread over its group, which makes the
rounding of both smaller. Source: ConvRot, https://arxiv.org/abs/2512.03673; comfy-kitchen stores what it describes.

Each format is a matrix of int8 numbers with one scale, or one for each row (`as_int8`), which is what multiplies.

Legend: M rows of activations, N rows of weights, K numbers of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

NAMES = ("int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8")
ROTATIONS = (256, 64, 16, 4)  # columns that we rotate together when encoding: the first that divides K
INT8_MAX = 127.0


class IntegerFormat(NamedTuple):
    """What a file says of a matrix. `text` is its `Packed.fmt`.

    rotation: columns that are rotated together, 0: none. group: numbers that share a `weight_s_rel`. int4: activations
    are rounded to 4 bits where the device multiplies such (convrot_w4a4). wide: products are of high precision.
    """

    name: str
    rotation: int = 0
    group: int = 0
    int4: bool = False
    wide: bool = False

    @property
    def text(self) -> str:
        """For example `int8_tensorwise convrot256`."""
        numbers = [f"{word}{n}" for word, n in (("convrot", self.rotation), ("group", self.group)) if n]
        return " ".join([self.name, *numbers, *["int4"] * self.int4, *["wide"] * self.wide])

    @property
    def numbers_in_byte(self) -> int:
        return 1 if self.name == "int8_tensorwise" else 2


@functools.cache
def integer_format(text: str) -> IntegerFormat | None:
    """The format of a `text`; None for those of other modules."""
    name, *settings = text.split() or [""]
    if name not in NAMES:
        return None

    def number(prefix: str) -> int:
        return next((int(word.removeprefix(prefix)) for word in settings if word.startswith(prefix)), 0)

    return IntegerFormat(name, number("convrot"), number("group"), "int4" in settings, "wide" in settings)


# ------------------------------------------------------------------------------------------------------------- rotation


def rotation_of(k: int) -> int:
    """Columns that are rotated together in rows of `k` numbers; 0 if no size divides them."""
    return next((size for size in ROTATIONS if k % size == 0), 0)


def is_rotation(size: int) -> bool:
    """Whether the Hadamard matrix exists: powers of 4."""
    return size >= 4 and size & (size - 1) == 0 and size.bit_length() % 2 == 1


@functools.cache
def hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """H [size, size], normalised: the Kronecker power of the 4 x 4 matrix of ones with -1 on the other diagonal. Cached
    on the device: a copy from the host cannot be captured into a CUDA graph."""
    assert is_rotation(size)
    four = 1 - 2 * torch.eye(4).flip(0)
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return (matrix / size**0.5).to(device, dtype)


def rotate(x: Tensor, size: int) -> Tensor:
    """x [..., K] times H in groups of `size` columns, in x's dtype; a second rotation takes it back. 0: x itself."""
    if not size:
        return x
    return (x.unflatten(-1, (-1, size)) @ hadamard(size, x.device, x.dtype)).flatten(-2)


# -------------------------------------------------------------------------------------------------------------- numbers


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> int8 and float32 scales [..., 1], computed in float32: the largest number of a row becomes 127."""
    values = x.float()
    scale = (values.abs().amax(-1, keepdim=True) / INT8_MAX).clamp(min=1e-30)
    return (values / scale).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def as_int8(fmt: IntegerFormat, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A matrix as int8 [N, K] and float32 scales, [1] or [N]; rotated if the format is."""
    weight = parts["weight"]
    if fmt.name == "int8_tensorwise":
        return weight, parts["weight_scale"].float().reshape(-1)
    low, high = weight & 15, (weight >> 4) & 15
    codes = torch.stack((low, high), -1).flatten(1)
    if fmt.name == "convrot_w4a4":
        return codes - 16 * (codes > 7).to(torch.int8), parts["weight_scale"].float().reshape(-1)
    book = parts.get("weight_codebook")
    values = codes.float() - 8 if book is None else book.float()[codes.int()]
    values = values.unflatten(1, (-1, fmt.group)) * parts["weight_s_rel"].float()[..., None]
    data = values.flatten(1).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return data, parts["weight_s_channel"].float().reshape(-1)


def decode(fmt: IntegerFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """The numbers of a matrix in float32 [N, K], rotated back."""
    data, scale = as_int8(fmt, parts)
    return rotate(data.float() * scale[:, None], fmt.rotation)


def encode_int8(weight: Tensor, rotation: int) -> dict[str, Tensor]:
    """The parts of `int8_tensorwise` with a scale for every row, from a weight [N, K]."""
    data, scale = quantize_rows(rotate(weight.float(), rotation))
    return {"weight": data, "weight_scale": scale}


def linear_reference(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, rotation: int) -> Tensor:
    """x [M, K], rounded to int8 with a scale for every row, times int8 data [N, K] with its scales, plus bias, in x's
    dtype. Products are summed in int32, which is exact."""
    rows, row_scale = quantize_rows(rotate(x.float(), rotation))
    out = torch.ops.aten._int_mm(rows, data.t()).float() * (row_scale * scale)
    return (out if bias is None else out + bias.float()).to(x.dtype)
