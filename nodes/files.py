"""From a name in a widget to the file behind it, and whether that file is what it should be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from wan_core.pipeline.model_parts import Part
from wan_core.pipeline.sources import TINY

from . import host

TINY_T2V, TINY_I2V, TINY_DRIVEN = "tiny (embedded)", "tiny i2v (embedded)", "tiny animate 2 (embedded)"


def embedded(name: str) -> dict[str, Path]:
    return {TINY_T2V: TINY / f"{name}.safetensors"}


def embedded_expert(expert: str) -> dict[str, Path]:
    """The driven variant has one transformer, and is not in the archive of ComfyUI's registry."""
    files = {TINY_T2V: TINY / f"t2v_{expert}.safetensors", TINY_I2V: TINY / f"i2v_{expert}.safetensors"}
    driven = TINY / "driven.safetensors"
    return files | ({TINY_DRIVEN: driven} if expert == "high" and driven.is_file() else {})


def locate(folder: str, name: object, inside: Mapping[str, Path]) -> Path:
    """The file behind a name that the widget offers: a file of the package (`inside`), or one that ComfyUI lists in a
    kind of model folder. All nodes open models through this. Raises OptionError for any other name."""
    return inside[name] if isinstance(name, str) and name in inside else host.model_path(folder, name)


def words_of(part: Part, computing: str) -> str:
    size = f"{part.parameters / 1e9:.1f} billion" if part.parameters >= 1e9 else f"{part.parameters / 1e6:.2f} million"
    stored = part.packed.fmt if part.packed is not None else "fp8" if part.scaled else name_of(part.stored)
    return f"{part.source}: {size} parameters, {stored}, computing in {computing}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
