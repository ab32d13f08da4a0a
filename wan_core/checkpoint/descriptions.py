"""What ComfyUI's files say of quantised matrices: the format of each, in a tensor beside it (`X.comfy_quant`, JSON as
bytes), or of all in the file's metadata (`_quantization_metadata`). A format that is not known is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import torch

from wan_core.checkpoint import integer_layers
from wan_core.checkpoint.attention_preferences import SUFFIX
from wan_core.checkpoint.errors import CheckpointError, listing
from wan_core.checkpoint.opened import Checkpoint
from wan_core.config.limits import MAX_DESCRIPTION

METADATA_KEY = "_quantization_metadata"
DESCRIPTION = "comfy_quant"
SCALED = ("float8_e4m3fn", "float8_e5m2")  # `scaled` reads these
PARTS = {"nvfp4": ("weight_scale", "weight_scale_2"), "mxfp8": ("weight_scale",), **integer_layers.PARTS}
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
        elif _COMFYUI.search(name) and not name.endswith(SUFFIX):
            raise CheckpointError(
                f"it has the tensor {name[:120]} of a ComfyUI newer than this version: known are .{DESCRIPTION} and "
                f"{SUFFIX}. Update WanCore, or use a file of bf16.",
                where=checkpoint.describe(),
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
            f"{', '.join(KNOWN)}. Use a file in one of these, or in bf16.",
            where=checkpoint.describe(),
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
            "matrices are quantised is not known. Download it again.",
            where=checkpoint.describe(),
        )
    return dict(layers)


def _in_tensor(checkpoint: Checkpoint, name: str) -> object:
    info = checkpoint.tensors[name]
    if info.dtype != torch.uint8 or info.nbytes > MAX_DESCRIPTION:
        raise CheckpointError(
            f"{name} is {info.dtype} {list(info.shape)}, and JSON in at most {MAX_DESCRIPTION} bytes (uint8) is "
            "expected: the format of its matrix is not known. Download it again.",
            where=checkpoint.describe(),
        )
    return _parsed(bytes(checkpoint.read(name).flatten().tolist()))


def _parsed(text: str | bytes) -> object:
    """None where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
