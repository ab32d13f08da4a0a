"""The names of parameters of Animate-2 on disk.

They are those of Wan 2.1 image-to-video. The official file has a level more, `blocks.N.block.`, ComfyUI's has none and
says what it is in its metadata, Diffusers renames attention only. Source: ComfyUI's model_animate2.py; diffusers
transformer_wan_animate_2.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from wan_core.models.wan.families.wan.keys import official_names as wan_official_names
from wan_core.models.wan.families.wan.keys import parameter_names as wan_parameter_names

_WRAPPED = re.compile(r"(blocks\.\d{1,6}\.)block\.(.+)")
_ATTENTION = re.compile(
    r"(blocks\.\d{1,6}\.(?:self|cross)_attn\.)"
    r"(to_[qkv]|to_out\.0|add_[kv]_proj|norm_added_k)\.(weight|bias)"
)
_PARTS = {
    **{f"to_{part}": part for part in "qkv"},
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_added_k": "norm_k_img",
}


def parameter_names(found: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of a transformer of `num_layers` blocks, without the level of the wrapper."""
    return wan_parameter_names(["img_emb.proj.0.weight"], num_layers)


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout: every block in a wrapper."""
    return _renamed({name: f"{match[1]}{match[2]}" for name in names if (match := _WRAPPED.fullmatch(name))}, names)


def diffusers_names(names: Collection[str]) -> dict[str, str] | None:
    """Diffusers' `WanAnimate2Transformer3DModel`, in which norms keep their official names."""
    inner = {name: match[1] + match[2] for name in names if (match := _WRAPPED.fullmatch(name))}
    own = {
        name: f"{match[1]}{_PARTS[match[2]]}.{match[3]}"
        for name in names
        if (match := _ATTENTION.fullmatch(inner.get(name, name)))
    }
    return _renamed({**inner, **own} if own else {}, names)


def comfyui_names(names: Collection[str]) -> dict[str, str] | None:
    """ComfyUI's layout, which is that of Wan 2.1 image-to-video: only metadata tells them apart."""
    return wan_official_names(names) if any(name.startswith("img_emb.") for name in names) else None


def _renamed(changed: dict[str, str], names: Collection[str]) -> dict[str, str] | None:
    """Names of a file -> official names, where `changed` has some; None where it has none."""
    if not changed:
        return None
    ours = {changed.get(name, name): name for name in names}
    found = wan_official_names(list(ours))
    return None if found is None else {ours[name]: official for name, official in found.items()}
