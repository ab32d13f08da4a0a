"""The names of parameters of S2V on disk, beside those of Wan 2.1 text-to-video. Official and ComfyUI's are the same.

Source: Wan2.2/wan/modules/s2v/model_s2v.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from wan_core.models.wan.families.wan.keys import official_names as wan_official_names
from wan_core.models.wan.families.wan.keys import parameter_names as wan_parameter_names

_OWN = re.compile(r"(trainable_cond_mask|cond_encoder|casual_audio_encoder|audio_injector|frame_packer)\..+")
_INJECTOR = re.compile(r"audio_injector\.injector\.(\d{1,3})\..+")
_ENCODER = "casual_audio_encoder.encoder"
_TOP = (
    "trainable_cond_mask.weight",
    *(f"cond_encoder.{kind}" for kind in ("weight", "bias")),
    "casual_audio_encoder.weights",
    *(
        f"{_ENCODER}.{name}.conv.{kind}"
        for name in ("conv1_local", "conv1_global", "conv2", "conv3")
        for kind in ("weight", "bias")
    ),
    *(f"{_ENCODER}.final_linear.{kind}" for kind in ("weight", "bias")),
    f"{_ENCODER}.padding_tokens",
    *(f"frame_packer.{name}.{kind}" for name in ("proj", "proj_2x", "proj_4x") for kind in ("weight", "bias")),
)
_PARTS = (*(f"{part}.{kind}" for part in "qkvo" for kind in ("weight", "bias")), "norm_q.weight", "norm_k.weight")


def injectors(names: Collection[str]) -> int:
    """One more than the highest number of an injector."""
    return max((int(match[1]) + 1 for name in names if (match := _INJECTOR.fullmatch(name))), default=0)


def parameter_names(found: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of a transformer of `num_layers` blocks."""
    count = injectors(found)
    return [
        *wan_parameter_names([], num_layers),
        *_TOP,
        *(f"audio_injector.injector.{n}.{part}" for n in range(count) for part in _PARTS),
        *(
            f"audio_injector.injector_adain_layers.{n}.linear.{kind}"
            for n in range(count)
            for kind in ("weight", "bias")
        ),
    ]


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout; None where nothing is the family's own."""
    own = {name: name for name in names if _OWN.fullmatch(name)}
    if not any(name.startswith("casual_audio_encoder.") for name in own):
        return None
    others = wan_official_names([name for name in names if name not in own])
    return None if others is None else {**others, **own}
