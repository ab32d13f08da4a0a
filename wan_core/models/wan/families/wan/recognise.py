"""From the shapes of a file to an architecture, and from an architecture to its task."""

from __future__ import annotations

import re
from collections.abc import Mapping

from wan_core.config.checks import OptionError, UserError
from wan_core.models.wan.config import T2V_1_3B, DiTConfig
from wan_core.models.wan.families.family import Choice, Clues, Shapes, Task
from wan_core.models.wan.families.shapes import block_count, num_heads, number, shape_of
from wan_core.models.wan.families.wan.keys import takes_features
from wan_core.models.wan.families.wan.tasks import TASKS

_RELEASE = re.compile(r"wan[ _.-]?(?:video)?[ _.-]?2[._-]?([12])(?!\d)", re.IGNORECASE)
NAMING = ("modelspec.title", "modelspec.architecture", "general.name", "general.basename")


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
        image_dim=shape_of(shapes, "img_emb.proj.1.weight", 2)[1] if takes_features(shapes) else None,
    )


def choose(dit: DiTConfig, clues: Clues) -> Choice:
    """The released task of this architecture. Raises OptionError where there is none.

    Two things only a name tells: whether a text-to-video transformer of 14B is Wan 2.1 or an expert of 2.2, and for
    which size an image-to-video transformer of 2.1 was tuned.
    """
    found = [
        task
        for task in TASKS
        if task.full_size is not None
        and (task.in_channels, task.image_dim) == (dit.in_channels, dit.image_dim)
        and (task.full_size.dim == T2V_1_3B.dim) == (dit.dim == T2V_1_3B.dim)
    ]
    if not found:
        features = "" if dit.image_dim is None else f" and CLIP features {dit.image_dim} wide"
        raise OptionError(
            f"a transformer of {dit.in_channels} input channels{features} belongs to no known task; "
            "name one with --task"
        )
    if len(found) == 1:
        return Choice(found[0])
    if dit.image_dim is not None:
        return _by_size(found, clues)
    return _by_release(found, clues)


def _by_size(found: list[Task], clues: Clues) -> Choice:
    for name in _names(clues):
        for task in found:
            size = task.name.rpartition("-")[2]
            if size.lower() in name.lower():
                return Choice(task, f"{size} by its name {name}")
    others = ", ".join(task.name for task in found[1:])
    return Choice(found[0], f"its name does not say for which size; with --task it is {others}")


def _by_release(found: list[Task], clues: Clues) -> Choice:
    """A second expert means 2.2. One file alone is what its name says; 2.2, as any other expert, where it says
    nothing."""
    experts, single = (next(task for task in found if task.two_experts is two) for two in (True, False))
    if not clues.alone:
        return Choice(experts)
    for name in _names(clues):
        match = _RELEASE.search(name)
        if match is not None:
            return Choice(single, f"Wan 2.1 by its name {name}") if match[1] == "1" else Choice(experts)
    return Choice(experts, f"its name does not say which release; if it is Wan 2.1, its task is {single.name}")


def _names(clues: Clues) -> list[str]:
    """What may name the model, the most telling first: its metadata, its file, the folders around it."""
    said = [clues.metadata[key] for key in NAMING if key in clues.metadata]
    path = clues.path
    return said if path is None else [*said, path.name, *(folder.name for folder in list(path.absolute().parents)[:2])]
