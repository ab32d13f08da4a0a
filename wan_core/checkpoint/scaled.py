"""Checkpoints with scaled FP8 matrices: which scale belongs to which weight.

Two namings are in use: `X.scale_weight` (with a marker tensor `scaled_fp8`) and `X.weight_scale` (with `X.comfy_quant`,
JSON as bytes, which names the format). A scale has one number, one per output channel, or one per 128 x 128 weights;
value = weight * scale. Scales of activations (`X.scale_input`, `X.input_scale`) are not used: the engine measures
activations during the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wan_core.checkpoint.comfyui_tensors import DESCRIPTION
from wan_core.checkpoint.opened import Checkpoint, CheckpointError, counted, listing
from wan_core.ops.kernels.formats import BLOCK

SCALES = ("scale_weight", "weight_scale")
UNUSED = ("scale_input", "input_scale", "scaled_fp8")
_WHAT = "a checkpoint with scaled (quantised) weights"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Scaled:
    """`scales`: weight -> its scale, as names in the file. `names`: all scales, markers and descriptions."""

    scales: Mapping[str, str]
    names: frozenset[str]


def find_scales(checkpoint: Checkpoint) -> Scaled:
    """The scales of `checkpoint`; empty if it has none. Unknown quantisation formats are not handled here; `detect`
    raises an error for them.

    Raises CheckpointError for a scale without its weight, an FP8 matrix without a scale, or an impossible shape.
    """
    tensors = checkpoint.tensors
    scales: dict[str, str] = {}
    unused: set[str] = set()
    for name in tensors:
        module, _, last = name.rpartition(".")
        if last in SCALES:
            scales[f"{module}.weight"] = name
        elif last in UNUSED or last == DESCRIPTION:  # the reader has taken out those of other formats
            unused.add(name)
    bare = [n for n, info in tensors.items() if info.dtype in FP8 and len(info.shape) == 2 and n not in scales]
    if not scales and not (unused and bare):  # FP8 without scales: the stored numbers are the weights
        return Scaled({}, frozenset())
    alone = [name for weight, name in scales.items() if weight not in tensors]
    if alone or bare:
        missing = counted(alone, "scales without a weight") if alone else counted(bare, "FP8 matrices without a scale")
        raise CheckpointError(f"{_WHAT}, but {missing}. Download it again.")
    unsupported = [name for weight, name in scales.items() if not _fits(tensors[weight].shape, tensors[name].shape)]
    if unsupported:
        raise CheckpointError(
            f"{_WHAT}, but {len(unsupported)} scales have a shape that is not supported ({listing(unsupported)}). "
            "Supported are one number, one per row, or one per 128 x 128 weights."
        )
    return Scaled(scales, frozenset({*scales.values(), *unused}))


def refuse_scaled(checkpoint: Checkpoint) -> None:
    """For readers that know no scales. Raises CheckpointError for a file that has some."""
    if find_scales(checkpoint).names:
        raise CheckpointError(
            "its weights are FP8 with scales, which is not supported for encoders of pictures and of sound: use a file "
            "of 16 bits"
        )


def _fits(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    if all(size == 1 for size in scale):
        return True
    if len(weight) != 2:
        return False
    n, k = weight
    return scale in ((n,), (n, 1), (-(-n // BLOCK), -(-k // BLOCK)))
