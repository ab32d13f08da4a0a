"""What ComfyUI's files say beside weights, in tensors of their own or in the metadata.

**Attention preferences**, tensors named `<attention module>.comfy_attention.config`, say which attention a transformer
or LoRA asks ComfyUI (0.37 and newer) for. They say nothing about the weights, and this engine's attention has an option
of its own: they are left out.

**Descriptions** say the format of quantised matrices: one tensor for each (`X.comfy_quant`, JSON as bytes), or one
entry of the file's metadata for all (`_quantization_metadata`). An unknown format is refused. A description of INT8 or
4-bit matrices has its parameters beside the format or under "params", see `kernels.integer_weights`.

Source: github.com/Comfy-Org/ComfyUI, QUANTIZATION.md, "Diffusion attention preferences", and pull requests 16419,
16831 and 16880.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import torch

from wan_core.checkpoint.opened import Checkpoint, CheckpointError, TensorInfo, listing
from wan_core.config.limits import MAX_DESCRIPTION
from wan_core.ops.kernels.integer_weights import IntegerFormat, is_rotation

SUFFIX = ".comfy_attention.config"


def is_preference(name: str) -> bool:
    return name.endswith(SUFFIX)


ROTATION = 256  # columns, where a rotated matrix does not say
GROUP = 16  # numbers that share a scale in asym_w4a8_int8, where it does not say
_BYTE = (torch.int8, torch.uint8)
INTEGER_PARTS = {
    "int8_tensorwise": ("weight_scale",),
    "convrot_w4a4": ("weight_scale",),
    "asym_w4a8_int8": ("weight_s_rel", "weight_s_channel"),
}
OPTIONAL = {"asym_w4a8_int8": ("weight_codebook",)}
METADATA_KEY = "_quantization_metadata"
DESCRIPTION = "comfy_quant"
SCALED = ("float8_e4m3fn", "float8_e5m2")
WIDE = "full_precision_matrix_mult"  # of a description: products are of high precision
PARTS = {"nvfp4": ("weight_scale", "weight_scale_2"), "mxfp8": ("weight_scale",), **INTEGER_PARTS}
"""Packed format -> its parts beside `weight`."""
KNOWN = (*SCALED, *PARTS)
_COMFYUI = re.compile(r"(^|\.)comfy_")


def descriptions(checkpoint: Checkpoint) -> dict[str, Mapping[str, object]]:
    """Module -> its description, whose "format" is one of `KNOWN`. Raises CheckpointError for any other, and for
    tensors of ComfyUI's that are not known."""
    stored = _in_metadata(checkpoint)
    for name in checkpoint.tensors:
        module, _, last = name.rpartition(".")
        if last == DESCRIPTION:
            stored[module] = _in_tensor(checkpoint, name)
        elif _COMFYUI.search(name) and not is_preference(name):
            raise CheckpointError(
                f"it has the tensor {name[:120]} of a ComfyUI newer than this version: known are .{DESCRIPTION} and "
                f"{SUFFIX}. Update WanCore, or use a file of bf16."
            )
    entries: dict[str, Mapping[str, object]] = {
        module: entry if isinstance(entry, dict) else {"format": entry} for module, entry in stored.items()
    }
    unknown = {module: entry.get("format") for module, entry in entries.items() if entry.get("format") not in KNOWN}
    if unknown:
        formats = sorted({one[:60] for one in unknown.values() if isinstance(one, str)})
        how = f"as {listing(formats)}" if formats else "in a format that its description does not name"
        raise CheckpointError(
            f"quantised {how} ({listing(list(unknown), 2)}), which this version cannot read; it reads "
            f"{', '.join(KNOWN)}. Use a file in one of these, or in bf16."
        )
    return entries


def _in_metadata(checkpoint: Checkpoint) -> dict[str, object]:
    text = checkpoint.metadata.get(METADATA_KEY)
    if text is None:
        return {}
    parsed = _parsed(text)
    layers = parsed.get("layers") if isinstance(parsed, dict) else None
    if not isinstance(layers, dict):
        raise CheckpointError(
            f'its metadata {METADATA_KEY} is not as expected, {{"layers": {{MODULE: {{"format": NAME}}}}}}: which '
            "matrices are quantised is not known. Download it again."
        )
    return dict(layers)


def _in_tensor(checkpoint: Checkpoint, name: str) -> object:
    info = checkpoint.tensors[name]
    if info.dtype != torch.uint8 or info.nbytes > MAX_DESCRIPTION:
        raise CheckpointError(
            f"{name} is {info.dtype} {list(info.shape)}, and JSON in at most {MAX_DESCRIPTION} bytes (uint8) is "
            "expected: the format of its matrix is not known. Download it again."
        )
    return _parsed(bytes(checkpoint.read(name).flatten().tolist()))


def _parsed(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
        wide=bool(parameters.get(WIDE, False)),
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
