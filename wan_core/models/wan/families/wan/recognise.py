"""From the shapes of a file to an architecture, and from an architecture to its task."""

from __future__ import annotations

from collections.abc import Mapping

from wan_core.config.checks import OptionError, UserError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.family import Choice, Clues, Shapes
from wan_core.models.wan.families.shapes import block_count, num_heads, number, shape_of
from wan_core.models.wan.families.wan.tasks import TASKS


def read_config(shapes: Shapes, metadata: Mapping[str, str]) -> DiTConfig:
    """The transformer that official `shapes` describe.

    `metadata` may give num_heads, text_len and eps, which shapes do not say. Raises UserError where a tensor that is
    needed is missing or has the wrong number of axes.
    """
    dim, in_channels, *patch = shape_of(shapes, "patch_embedding.weight", 5)
    volume = patch[0] * patch[1] * patch[2]
    head_rows = shape_of(shapes, "head.head.weight", 2)[0]
    if not volume or max(patch) > 16 or head_rows % volume:
        raise UserError(f"its head of {head_rows} rows does not fit patches of {' x '.join(map(str, patch))}")
    return DiTConfig(
        in_channels=in_channels,
        out_channels=head_rows // volume,
        dim=dim,
        ffn_dim=shape_of(shapes, "blocks.0.ffn.0.weight", 2)[0],
        num_heads=num_heads(dim, metadata),
        num_layers=block_count(shapes),
        text_dim=shape_of(shapes, "text_embedding.0.weight", 2)[1],
        text_len=int(number(metadata, "text_len", DiTConfig.text_len)),
        freq_dim=shape_of(shapes, "time_embedding.0.weight", 2)[1],
        patch_size=(patch[0], patch[1], patch[2]),
        eps=number(metadata, "eps", DiTConfig.eps),
    )


def choose(dit: DiTConfig, clues: Clues) -> Choice:
    """The released task whose input has as many channels. Raises OptionError where there is none."""
    for task in TASKS:
        if task.full_size is not None and task.in_channels == dit.in_channels:
            return Choice(task)
    raise OptionError(
        f"a transformer of {dit.in_channels} input channels belongs to no known task; name one with --task"
    )
