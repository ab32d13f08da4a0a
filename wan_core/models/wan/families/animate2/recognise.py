"""From the shapes and metadata of a file to an architecture, and to its task."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping

from wan_core.config.checks import OptionError, UserError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.animate2.config import Animate2Config
from wan_core.models.wan.families.animate2.tasks import BASE, DISTILLED
from wan_core.models.wan.families.family import Choice, Clues, Shapes, Task
from wan_core.models.wan.families.shapes import transformer_settings
from wan_core.models.wan.families.wan.recognise import read_config as read_wan_config

METADATA = {"config": json.dumps({"transformer": {"model_type": "animate2"}})}  # as of ComfyUI's files
NAMED = re.compile(r"animate[ _.-]?2(?!\.?\d)", re.IGNORECASE)
_DISTILLED = re.compile(r"distill", re.IGNORECASE)


def claims(metadata: Mapping[str, str]) -> bool:
    """Whether the metadata says so, as ComfyUI's files do."""
    return transformer_settings(metadata).get("model_type") == "animate2"


def read_config(shapes: Shapes, metadata: Mapping[str, str]) -> Animate2Config:
    """The transformer that official `shapes` describe. Raises UserError."""
    wan = read_wan_config(shapes, metadata)
    if wan.in_channels != 2 * wan.out_channels + 4:
        raise UserError(
            f"a transformer of {wan.in_channels} input channels is none of Animate-2, which takes "
            f"{2 * wan.out_channels + 4}"
        )
    fields = {field.name: getattr(wan, field.name) for field in dataclasses.fields(DiTConfig)}
    return Animate2Config(**{**fields, "family": "animate2"})


def why_not_sparse(task: Task) -> str:
    """Why a task cannot have sparse attention; "": it can."""
    if task.name != DISTILLED.name:
        return ""
    return (
        "distilled weights of Animate-2 scale the scores of one frame, and sparse kernels read blocks as they are: "
        "leave it off"
    )


def choose(dit: DiTConfig, clues: Clues) -> Choice:
    """Tensors and metadata are the same for both tasks: the name tells. Raises OptionError where a second transformer
    is given."""
    if not clues.alone:
        raise OptionError("Animate-2 is one transformer for all steps: leave the second file out")
    name = "" if clues.path is None else clues.path.name
    if _DISTILLED.search(name):
        return Choice(DISTILLED, f"distilled by its name {name}")
    return Choice(BASE, f"its name does not say that it is distilled; if it is, its task is {DISTILLED.name}")
