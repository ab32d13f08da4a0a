"""Numbers of an architecture, read from the shapes of its tensors and the metadata of its file. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from wan_core.config.checks import UserError
from wan_core.config.limits import MAX_JSON
from wan_core.models.wan.families.family import Shapes

MAX_SIZE = 2**20  # no real model comes near; bounds what a damaged file can make us build


IN_BLOCK = re.compile(r"blocks\.(0|[1-9]\d{0,5})\.(.+)")


def block_count(names: Collection[str]) -> int:
    """One more than the highest block number among official names."""
    return max((int(match[1]) + 1 for name in names if (match := IN_BLOCK.fullmatch(name))), default=0)


def shape_of(shapes: Shapes, name: str, axes: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there. Raises UserError."""
    if name not in shapes:
        raise UserError(f"the tensor {name} is missing. Download it again.")
    if len(shapes[name]) != axes or 0 in shapes[name]:
        raise UserError(f"the tensor {name} has the shape {list(shapes[name])}, and {axes} axes are expected.")
    return shapes[name]


def number(metadata: Mapping[str, str], key: str, default: float) -> float:
    """The positive number that `metadata` gives for `key`, by itself or in its `config`. Raises UserError for anything
    else."""
    said = metadata.get(key, json.dumps(transformer_settings(metadata).get(key, default)))
    try:
        value = json.loads(said[:40])
    except ValueError:
        value = None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MAX_SIZE:
        raise UserError(f"the metadata {key} = {said[:40]!r} is not a positive number")
    return value


def transformer_settings(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """What the metadata `config` says of the transformer, as ComfyUI's files have it: JSON {"transformer": {...}}."""
    try:
        config = json.loads(metadata.get("config", "{}")[:MAX_JSON])
    except (ValueError, RecursionError):
        return {}
    found = config.get("transformer") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def num_heads(dim: int, metadata: Mapping[str, str]) -> int:
    """How many heads a transformer of width `dim` has: of 128 channels each, unless `metadata` says otherwise."""
    if "num_heads" not in {*metadata, *transformer_settings(metadata)} and dim % 128:
        raise UserError(
            f"its width of {dim} is no multiple of 128, so the number of heads cannot be told from the shapes. Add "
            "num_heads to the file's metadata, or keep the model's config.json beside it."
        )
    heads = int(number(metadata, "num_heads", dim // 128))
    if not 0 < heads <= dim:
        raise UserError(f"num_heads = {heads} does not fit a width of {dim}")
    return heads
