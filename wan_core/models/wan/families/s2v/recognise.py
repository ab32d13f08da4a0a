"""From the shapes of an S2V file to its architecture, and to its task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from wan_core.config.checks import OptionError, UserError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.family import Choice, Clues, Shapes
from wan_core.models.wan.families.s2v.config import INJECT_AFTER, S2VConfig
from wan_core.models.wan.families.s2v.keys import injectors
from wan_core.models.wan.families.s2v.tasks import TASKS
from wan_core.models.wan.families.shapes import shape_of
from wan_core.models.wan.families.wan.recognise import read_config as read_wan_config

_ENCODER = "casual_audio_encoder.encoder"


def read_config(shapes: Shapes, metadata: Mapping[str, str]) -> S2VConfig:
    """The transformer that official `shapes` describe. Raises UserError."""
    wan = read_wan_config(shapes, metadata)
    count = injectors(shapes)
    if not 0 < count <= len(INJECT_AFTER) or INJECT_AFTER[count - 1] >= wan.num_layers:
        places = ", ".join(map(str, INJECT_AFTER))
        raise UserError(
            f"its {count} audio injectors do not fit {wan.num_layers} blocks: they belong behind blocks {places}"
        )
    local, width, _ = shape_of(shapes, f"{_ENCODER}.conv1_local.conv.weight", 3)
    one = shape_of(shapes, f"{_ENCODER}.conv1_global.conv.weight", 3)[0]
    if local % one:
        raise UserError(f"its audio encoder has {local} channels, which {one} do not divide.")
    fields = {field.name: getattr(wan, field.name) for field in dataclasses.fields(DiTConfig)}
    return S2VConfig(
        **{**fields, "family": "s2v"},
        audio_layers=shape_of(shapes, "casual_audio_encoder.weights", 4)[1],
        audio_dim=width,
        audio_tokens=local // one,
        pose_channels=shape_of(shapes, "cond_encoder.weight", 5)[1],
        injectors=count,
    )


def choose(dit: DiTConfig, clues: Clues) -> Choice:
    """Its one task. Raises OptionError where a second transformer is given."""
    if not clues.alone:
        raise OptionError("S2V is one transformer for all steps: leave the second file out")
    return Choice(TASKS[0])
