"""Checkpoints whose matrices are FP8 with scales: which scale belongs to which weight.

Two spellings are in use, `X.scale_weight` (with a marker tensor `scaled_fp8`) and `X.weight_scale` (with
`X.comfy_quant`, JSON as bytes, that names the format). A scale is one number, one for every output channel, or one for
every 128 x 128 weights; value = weight * scale. Scales of activations (`X.scale_input`, `X.input_scale`) are left
unused: the engine measures activations while it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wan_core.checkpoint.errors import CheckpointError, counted, listing
from wan_core.checkpoint.opened import Checkpoint
from wan_core.ops.kernels.formats import BLOCK

SCALES = ("scale_weight", "weight_scale")
UNUSED = ("scale_input", "input_scale", "scaled_fp8")
DESCRIPTION = "comfy_quant"
_WHAT = "a checkpoint with scaled (quantised) weights"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Scaled:
    """`scales`: weight -> its scale, both by their names in the file. `names`: all tensors that only serve this."""

    scales: Mapping[str, str]
    names: frozenset[str]


def find_scales(checkpoint: Checkpoint) -> Scaled:
    """The scales of `checkpoint`; nothing where it has none. Names of formats that are not known here are left for
    others to refuse.

    Raises CheckpointError: a scale without its weight, an FP8 matrix without a scale, a scale of an impossible shape.
    """
    tensors = checkpoint.tensors
    scales: dict[str, str] = {}
    unused: set[str] = set()
    for name in tensors:
        module, _, last = name.rpartition(".")
        if last in SCALES:
            scales[f"{module}.weight"] = name
        elif last in UNUSED or (last == DESCRIPTION and _is_plain_fp8(checkpoint, name)):
            unused.add(name)
    bare = [n for n, info in tensors.items() if info.dtype in FP8 and len(info.shape) == 2 and n not in scales]
    if not scales and not (unused and bare):  # plain FP8 stands for the numbers that it holds
        return Scaled({}, frozenset())
    alone = [name for weight, name in scales.items() if weight not in tensors]
    if alone or bare:
        missing = counted(alone, "scales without a weight") if alone else counted(bare, "FP8 matrices without a scale")
        raise CheckpointError(f"{_WHAT}, but {missing}. Download it again.")
    wrong = [name for weight, name in scales.items() if not _fits(tensors[weight].shape, tensors[name].shape)]
    if wrong:
        raise CheckpointError(
            f"{_WHAT}, but {len(wrong)} scales have a shape that is not supported ({listing(wrong)}): one number, one "
            "for a row, or one for 128 x 128 are."
        )
    return Scaled(scales, frozenset({*scales.values(), *unused}))


def _fits(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    if all(size == 1 for size in scale):
        return True
    if len(weight) != 2:
        return False
    n, k = weight
    return scale in ((n,), (n, 1), (-(-n // BLOCK), -(-k // BLOCK)))


def _is_plain_fp8(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the description of a matrix says that it is FP8 with a scale: there are others (MXFP8, NVFP4)."""
    info = checkpoint.tensors[name]
    if info.dtype != torch.uint8 or info.nbytes > 4096:
        return False
    try:
        found = json.loads(bytes(checkpoint.read(name).flatten().tolist()))
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and str(found.get("format", "")).startswith("float8_e")
