"""The names of parameters of VACE on disk, beside those of text-to-video.

Source: VACE/vace/models/wan/modules/model.py; diffusers transformer_wan_vace.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from wan_core.models.wan.families.shapes import IN_BLOCK
from wan_core.models.wan.families.wan.keys import diffusers_modules as wan_diffusers_modules
from wan_core.models.wan.families.wan.keys import diffusers_names as wan_diffusers_names
from wan_core.models.wan.families.wan.keys import official_names as wan_official_names
from wan_core.models.wan.families.wan.keys import parameter_names as wan_parameter_names

_PATCHES = tuple(f"vace_patch_embedding.{kind}" for kind in ("weight", "bias"))
_PROJECTION = re.compile(r"(vace_blocks\.(?:0|[1-9]\d{0,5})\.)(\w+)\.(weight|bias)")
_OFFICIAL = {"before_proj": "before_proj", "after_proj": "after_proj"}
_DIFFUSERS = {"proj_in": "before_proj", "proj_out": "after_proj"}
Table = Callable[[Collection[str]], "dict[str, str] | None"]


def vace_block_count(names: Collection[str]) -> int:
    """One more than the highest number of a VACE block among official names."""
    numbers = (IN_BLOCK.fullmatch(name.removeprefix("vace_")) for name in names if name.startswith("vace_"))
    return max((int(match[1]) + 1 for match in numbers if match), default=0)


def parameter_names(found: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of a transformer of `num_layers` blocks, with as many VACE blocks as `found`
    has."""
    main = wan_parameter_names([], num_layers)
    block = [name.removeprefix("blocks.0.") for name in main if name.startswith("blocks.0.")]
    projections = [f"{name}.{kind}" for name in _OFFICIAL for kind in ("weight", "bias")]
    numbers = range(min(vace_block_count(found), num_layers))
    return [
        *main,
        *_PATCHES,
        *(
            f"vace_blocks.{n}.{name}"
            for n in numbers
            for name in (*block, *(projections if n == 0 else projections[2:]))
        ),
    ]


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout, which is ComfyUI's too."""
    return _names(names, wan_official_names, _OFFICIAL)


def diffusers_names(names: Collection[str]) -> dict[str, str] | None:
    """Diffusers' `WanVACETransformer3DModel`."""
    return _names(names, wan_diffusers_names, _DIFFUSERS)


def _names(names: Collection[str], table: Table, projections: dict[str, str]) -> dict[str, str] | None:
    """By `table`, the names of text-to-video; those of VACE blocks by it, too."""
    own = {name: name for name in names if name in _PATCHES}
    for name in names:
        if (match := _PROJECTION.fullmatch(name)) and match[2] in projections:
            own[name] = f"{match[1]}{projections[match[2]]}.{match[3]}"
    blocks = [name.removeprefix("vace_") for name in names if name.startswith("vace_") and name not in own]
    if not own and not blocks:
        return None
    inner = table(blocks) or {}
    main = table([name for name in names if not name.startswith("vace_")])
    return None if main is None else {**main, **own, **{f"vace_{n}": f"vace_{ours}" for n, ours in inner.items()}}


def diffusers_modules(num_layers: int) -> dict[str, str]:
    """As of text-to-video, and the modules of VACE blocks."""
    main = wan_diffusers_modules(num_layers)
    blocks = {f"vace_{theirs}": f"vace_{ours}" for theirs, ours in main.items() if theirs.startswith("blocks.")}
    projections = {
        f"vace_blocks.{n}.{theirs}": f"vace_blocks.{n}.{ours}"
        for n in range(num_layers)
        for theirs, ours in _DIFFUSERS.items()
    }
    return {**main, **blocks, **projections, "vace_patch_embedding": "vace_patch_embedding"}
