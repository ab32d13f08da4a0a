"""From the shapes of a VACE file to its architecture, and to its task."""

from __future__ import annotations

import re
from collections.abc import Mapping

from wan_core.config.checks import UserError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.family import Choice, Clues, Shapes
from wan_core.models.wan.families.shapes import shape_of
from wan_core.models.wan.families.vace.config import VACE_1_3B, VaceConfig, with_vace
from wan_core.models.wan.families.vace.keys import vace_block_count
from wan_core.models.wan.families.vace.tasks import EXPERTS, SINGLE, SMALL
from wan_core.models.wan.families.wan.recognise import read_config as read_wan_config

_PATCHES = "vace_patch_embedding.weight"
_EXPERT = re.compile(r"wan[ _.-]?2[._-]?2(?!\d)|(high|low)[ _-]?noise|a14b", re.IGNORECASE)


def read_config(shapes: Shapes, metadata: Mapping[str, str]) -> VaceConfig:
    """The transformer that official `shapes` describe. Its VACE blocks are spread evenly over its blocks. Raises
    UserError."""
    wan, blocks = read_wan_config(shapes, metadata), vace_block_count(shapes)
    found = with_vace(wan, max(1, -(-wan.num_layers // max(1, blocks))), shape_of(shapes, _PATCHES, 5)[1])
    if found.vace_blocks != blocks:
        raise UserError(f"its {blocks} VACE blocks cannot be spread evenly over {wan.num_layers} blocks.")
    return found


def choose(dit: DiTConfig, clues: Clues) -> Choice:
    """The task of an architecture. An expert of Wan 2.2 has the tensors of Wan 2.1 14B: a second file, or the name,
    tells."""
    if not clues.alone:
        return Choice(EXPERTS)
    if dit.dim == VACE_1_3B.dim:
        return Choice(SMALL)
    name = "" if clues.path is None else clues.path.name
    if _EXPERT.search(name):
        return Choice(EXPERTS, f"an expert of Wan 2.2 by its name {name}")
    return Choice(SINGLE, f"its name does not say Wan 2.2; if it is an expert of that, its task is {EXPERTS.name}")
