"""From the shapes of an Animate file to its architecture, and to its task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from wan_core.config.checks import OptionError, UserError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.animate.config import AnimateConfig
from wan_core.models.wan.families.animate.keys import CONVS, last_conv
from wan_core.models.wan.families.animate.tasks import TASKS
from wan_core.models.wan.families.family import Choice, Clues, Shapes
from wan_core.models.wan.families.shapes import shape_of
from wan_core.models.wan.families.wan.recognise import read_config as read_wan_config


def read_config(shapes: Shapes, metadata: Mapping[str, str]) -> AnimateConfig:
    """The transformer that official `shapes` describe. Raises UserError."""
    dim, head_dim = shape_of(shapes, "patch_embedding.weight", 5)[0], _length(shapes, "q_norm")
    wan = read_wan_config(shapes, {"num_heads": str(max(1, dim // head_dim)), **metadata})
    fields = {field.name: getattr(wan, field.name) for field in dataclasses.fields(DiTConfig)}
    stages = range(1, last_conv(shapes))
    outputs = (shape_of(shapes, f"{CONVS}.{n}.conv2.1.weight", 4)[0] for n in stages)
    hidden = shape_of(shapes, "face_encoder.conv2.conv.weight", 3)[0]
    local = shape_of(shapes, "face_encoder.conv1_local.conv.weight", 3)[0]
    if local % hidden:
        raise UserError(f"its face encoder has {local} channels, which {hidden} do not divide.")
    features, directions = shape_of(shapes, "motion_encoder.dec.direction.weight", 2)
    return AnimateConfig(
        **{**fields, "family": "animate"},
        pose_channels=shape_of(shapes, "pose_patch_embedding.weight", 5)[1],
        motion_channels=(shape_of(shapes, f"{CONVS}.0.0.weight", 4)[0], *outputs),
        motion_features=features,
        motion_directions=directions,
        face_hidden=hidden,
        face_tokens=local // hidden,
    )


def _length(shapes: Shapes, norm: str) -> int:
    return shape_of(shapes, f"face_adapter.fuser_blocks.0.{norm}.weight", 1)[0]


def choose(dit: DiTConfig, clues: Clues) -> Choice:
    """Its one task. Raises OptionError where a second transformer is given."""
    if not clues.alone:
        raise OptionError("Animate is one transformer for all steps: leave the second file out")
    return Choice(TASKS[0])
