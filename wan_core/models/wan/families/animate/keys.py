"""The names of parameters of Animate on disk, beside those of Wan 2.1 image-to-video.

Source: Wan2.2/wan/modules/animate/model_animate.py; diffusers transformer_wan_animate.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from wan_core.models.wan.families.animate.config import FACE_EVERY
from wan_core.models.wan.families.family import Assembled, Shapes
from wan_core.models.wan.families.wan.keys import diffusers_names as wan_diffusers_names
from wan_core.models.wan.families.wan.keys import official_names as wan_official_names
from wan_core.models.wan.families.wan.keys import parameter_names as wan_parameter_names

CONVS = "motion_encoder.enc.net_app.convs"
_OWN = re.compile(r"(motion_encoder|face_encoder|face_adapter|pose_patch_embedding)\..+")
_CONV = re.compile(r"motion_encoder\.enc\.net_app\.convs\.(\d{1,2})\..+")
CONSTANT = re.compile(rf"(.*\.)?{re.escape(CONVS)}\.\d+\.(conv2|skip)\.0\.kernel")  # a filter, the same in every file
_FUSER = (
    *(f"{name}.{kind}" for name in ("linear1_kv", "linear1_q", "linear2") for kind in ("weight", "bias")),
    "q_norm.weight",
    "k_norm.weight",
)
_TOP = (
    *(f"pose_patch_embedding.{kind}" for kind in ("weight", "bias")),
    *(f"face_encoder.{name}.conv.{kind}" for name in ("conv1_local", "conv2", "conv3") for kind in ("weight", "bias")),
    "face_encoder.out_proj.weight",
    "face_encoder.out_proj.bias",
    "face_encoder.padding_tokens",
    *(f"motion_encoder.enc.fc.{n}.{kind}" for n in range(5) for kind in ("weight", "bias")),
    "motion_encoder.dec.direction.weight",
)
_STAGE = ("conv1.0.weight", "conv1.1.bias", "conv2.1.weight", "conv2.2.bias", "skip.1.weight")


def last_conv(names: Collection[str]) -> int:
    """The number of the motion encoder's last convolution."""
    return max((int(match[1]) for name in names if (match := _CONV.fullmatch(name))), default=8)


def parameter_names(found: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of a transformer of `num_layers` blocks."""
    stages = last_conv(found)
    return [
        *wan_parameter_names(["img_emb.proj.0.weight"], num_layers),
        *_TOP,
        f"{CONVS}.0.0.weight",
        f"{CONVS}.0.1.bias",
        *(f"{CONVS}.{n}.{name}" for n in range(1, stages) for name in _STAGE),
        f"{CONVS}.{stages}.weight",
        *(f"face_adapter.fuser_blocks.{n}.{name}" for n in range(-(-num_layers // FACE_EVERY)) for name in _FUSER),
    ]


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout, which is ComfyUI's too."""
    own = {name: name for name in names if _OWN.fullmatch(name) and not CONSTANT.fullmatch(name)}
    return _beside(wan_official_names, [name for name in names if not CONSTANT.fullmatch(name)], own)


def diffusers_names(names: Collection[str]) -> dict[str, str] | None:
    """Diffusers' `WanAnimateTransformer3DModel`, once `assembled` has put together what it splits."""
    last = max((int(match[1]) for name in names if (match := _RES_BLOCK.fullmatch(name))), default=-1) + 2
    return _beside(wan_diffusers_names, names, {name: ours for name in names if (ours := _official(name, last))})


def _beside(table, names: Collection[str], own: dict[str, str]) -> dict[str, str] | None:  # type: ignore[no-untyped-def]
    """`own` with what the key table of `wan` knows of the other names; None where nothing is the family's own."""
    if not own:
        return None
    others = table([name for name in names if name not in own])
    return None if others is None else {**others, **own}


# ------------------------------------------------------------------------------------------------------------ Diffusers

_RES_BLOCK = re.compile(r"motion_encoder\.res_blocks\.(\d{1,2})\.(conv1|conv2|conv_skip)\.(weight|act_fn\.bias)")
_ADAPTER = re.compile(r"face_adapter\.(\d{1,3})\.(to_q|to_kv|to_out|norm_q|norm_k)\.(weight|bias)")
_STAGE_PARTS = {
    ("conv1", "weight"): "conv1.0.weight",
    ("conv1", "act_fn.bias"): "conv1.1.bias",
    ("conv2", "weight"): "conv2.1.weight",
    ("conv2", "act_fn.bias"): "conv2.2.bias",
    ("conv_skip", "weight"): "skip.1.weight",
}
_ADAPTER_PARTS = {
    "to_q": "linear1_q",
    "to_kv": "linear1_kv",
    "to_out": "linear2",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
_LINES = (
    (re.compile(r"(pose_patch_embedding\.(?:weight|bias)|face_encoder\.(?:out_proj\.(?:weight|bias)|padding_tokens))"),
     r"\1"),
    (re.compile(r"face_encoder\.(conv1_local|conv2|conv3)\.(weight|bias)"), r"face_encoder.\1.conv.\2"),
    (re.compile(r"motion_encoder\.conv_in\.weight"), rf"{CONVS}.0.0.weight"),
    (re.compile(r"motion_encoder\.conv_in\.act_fn\.bias"), rf"{CONVS}.0.1.bias"),
    (re.compile(r"motion_encoder\.motion_network\.(\d)\.(weight|bias)"), r"motion_encoder.enc.fc.\1.\2"),
    (re.compile(r"motion_encoder\.motion_synthesis_weight"), "motion_encoder.dec.direction.weight"),
)  # fmt: skip


def _official(name: str, last: int) -> str | None:
    if match := _RES_BLOCK.fullmatch(name):
        part = _STAGE_PARTS.get((match[2], match[3]))
        return None if part is None else f"{CONVS}.{int(match[1]) + 1}.{part}"
    if match := _ADAPTER.fullmatch(name):
        return f"face_adapter.fuser_blocks.{match[1]}.{_ADAPTER_PARTS[match[2]]}.{match[3]}"
    if name == "motion_encoder.conv_out.weight":
        return f"{CONVS}.{last}.weight"
    return next((match.expand(ours) for theirs, ours in _LINES if (match := theirs.fullmatch(name))), None)


def assembled(shapes: Shapes) -> Mapping[str, Assembled]:
    """What Diffusers splits or flattens: keys and values of the face are two linears, and biases of the motion encoder
    have one axis. The new tensor's name -> the stored tensors, which are joined row by row, and the shape."""
    found: dict[str, Assembled] = {}
    for name, shape in shapes.items():
        if match := re.fullmatch(r"((?:.*\.)?face_adapter\.\d{1,3}\.)to_k\.(weight|bias)", name):
            value = f"{match[1]}to_v.{match[2]}"
            if shapes.get(value) == shape:
                found[f"{match[1]}to_kv.{match[2]}"] = Assembled((name, value), (2 * shape[0], *shape[1:]))
        elif re.fullmatch(r"(?:.*\.)?motion_encoder\.(conv_in|res_blocks\..+)\.act_fn\.bias", name) and len(shape) == 1:
            found[name] = Assembled((name,), (1, shape[0], 1, 1))
    return found
