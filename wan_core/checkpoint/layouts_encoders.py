"""Encoders on disk that serve a family: CLIP vision (image-to-video of 2.1, Animate, Fun) and wav2vec 2.0 (S2V).

CLIP: the official `.pth`, which holds a text encoder too and has queries, keys and values of a layer in one matrix, and
Hugging Face's layout, which ComfyUI's `clip_vision_h.safetensors` and the `image_encoder` of Diffusers releases have.
What Wan does not use is not read: the last layer, the final norm and the projections.

wav2vec 2.0: Hugging Face's layout, with or without `wav2vec2.` in front, which ComfyUI's
`wav2vec2_large_english_fp16.safetensors` has, too. The positional convolution is stored as a direction and a length for
each place of its kernel, under the names of either of torch's two ways of doing that. Masks and the words' head are not
read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from math import prod

import torch
from torch import Tensor

from wan_core.models.audio.wav2vec2 import GROUPS, STRIDES, SpeechConfig
from wan_core.models.audio.wav2vec2 import HEAD_DIM as SPEECH_HEAD_DIM
from wan_core.models.vision.clip import HEAD_DIM, VisionConfig
from wan_core.models.wan.families.family import Assembled, Shapes

_INDEX = "0|[1-9][0-9]{0,3}"

# ------------------------------------------------------------------------------------------------------- CLIP vision

# Our parameter or module -> Hugging Face's, official.
_TOP = {
    "cls": ("embeddings.class_embedding", "cls_embedding"),
    "positions": ("embeddings.position_embedding.weight", "pos_embedding"),
    "patch.weight": ("embeddings.patch_embedding.weight", "patch_embedding.weight"),
    "norm.weight": ("pre_layrnorm.weight", "pre_norm.weight"),
    "norm.bias": ("pre_layrnorm.bias", "pre_norm.bias"),
}
_LAYER = {
    "norm1": ("layer_norm1", "norm1"),
    "q": ("self_attn.q_proj", "attn.q"),
    "k": ("self_attn.k_proj", "attn.k"),
    "v": ("self_attn.v_proj", "attn.v"),
    "o": ("self_attn.out_proj", "attn.proj"),
    "norm2": ("layer_norm2", "norm2"),
    "fc1": ("mlp.fc1", "mlp.0"),
    "fc2": ("mlp.fc2", "mlp.2"),
}
VISION_LAYOUTS = {  # name -> column of the tables, prefix, prefix of a layer
    "huggingface": (0, "vision_model.", "encoder.layers."),
    "official": (1, "visual.", "transformer."),
}
_THREE_IN_ONE = re.compile(rf"(visual\.transformer\.(?:{_INDEX})\.attn\.)to_qkv(\.weight|\.bias)")


def vision_names(names: Collection[str], layout: str) -> dict[str, str] | None:
    """Name in the file -> our parameter, in all layers but the last; None if this is another layout."""
    column, prefix, inner = VISION_LAYOUTS[layout]
    block = re.compile(rf"{re.escape(prefix + inner)}({_INDEX})\.(.+)\.(weight|bias)")
    matches = {name: match for name in names if (match := block.fullmatch(name))}
    last = max((int(match[1]) for match in matches.values()), default=0)
    top = {prefix + theirs[column]: ours for ours, theirs in _TOP.items()}
    modules = {theirs[column]: ours for ours, theirs in _LAYER.items()}
    return {name: top[name] for name in names if name in top and matches} | {
        name: f"layers.{match[1]}.{modules[match[2]]}.{match[3]}"
        for name, match in matches.items()
        if match[2] in modules and int(match[1]) < last
    }


def vision_config(shapes: Shapes, metadata: Mapping[str, str]) -> VisionConfig:
    """The encoder that our parameters of these shapes are of. Raises ValueError."""
    patch, fc1, positions = (shapes.get(name, ()) for name in ("patch.weight", "layers.0.fc1.weight", "positions"))
    if len(patch) != 4 or len(fc1) != 2 or not patch[0] or patch[0] % HEAD_DIM or not positions:
        raise ValueError(f"a CLIP vision encoder of width {patch[0] if patch else 0}; Wan's is ViT-H/14, 1280 wide")
    layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers."))
    tokens = prod(positions) // patch[0]
    return VisionConfig(dim=patch[0], ffn_dim=fc1[0], num_layers=layers, patch=patch[-1], tokens=tokens)


# ------------------------------------------------------------------------------------------------------- wav2vec 2.0

PREFIX = "wav2vec2."
_CONVS = "feature_extractor.conv_layers."
_POSITION = "encoder.pos_conv_embed.conv."
_PARTS = (("weight_g", "weight_v"), ("parametrizations.weight.original0", "parametrizations.weight.original1"))
_SPEECH = re.compile(
    rf"(feature_extractor\.conv_layers\.({_INDEX})\.(conv|layer_norm)|feature_projection\.(layer_norm|projection)"
    rf"|encoder\.(pos_conv_embed\.conv|layer_norm|layers\.({_INDEX})\..+))\.(weight|bias)"
)
_EXPECTED = "Expected is wav2vec2-large-xlsr-53-english, or ComfyUI's wav2vec2_large_english_fp16.safetensors"


def speech_names(names: Collection[str]) -> dict[str, str] | None:
    """Name in the file -> our parameter; None if this is no speech encoder."""
    ours = {name: name.removeprefix(PREFIX) for name in names}
    if not any(name.startswith(_CONVS) for name in ours.values()):
        return None
    return {theirs: name for theirs, name in ours.items() if _SPEECH.fullmatch(name)}


def speech_config(shapes: Shapes, metadata: Mapping[str, str]) -> SpeechConfig:
    """The encoder that our parameters of these shapes are of. Raises ValueError."""
    layers = [int(name.split(".")[2]) for name in shapes if name.startswith("encoder.layers.")]
    convs = [f"{_CONVS}{n}.conv.weight" for n in range(len(STRIDES))]
    wide = "encoder.layers.0.feed_forward.intermediate_dense.weight"
    needed = {**dict.fromkeys(convs, 3), wide: 2}
    if not layers or any(len(shapes.get(name, ())) != count for name, count in needed.items()):
        raise ValueError(f"not a wav2vec 2.0 speech encoder. {_EXPECTED}")
    if f"{_POSITION}weight" not in shapes:
        raise ValueError(f"a speech encoder, but {_POSITION}{_PARTS[0][0]} or {_PARTS[0][1]} is missing")
    normed = all(f"{_CONVS}{n}.layer_norm.weight" in shapes for n in range(len(STRIDES)))
    (ffn_dim, dim), position = shapes[wide], shapes[f"{_POSITION}weight"]
    if not normed or len(position) != 3 or not dim or dim % SPEECH_HEAD_DIM or dim % GROUPS:
        raise ValueError(f"a wav2vec 2.0 speech encoder of another kind, {dim} wide. {_EXPECTED}")
    return SpeechConfig(
        dim=dim,
        ffn_dim=ffn_dim,
        num_layers=max(layers) + 1,
        conv_dim=shapes[convs[0]][0],
        kernels=tuple(shapes[name][2] for name in convs),
        position_kernel=position[2],
    )


# --------------------------------------------------------------------------------------------- what is made of parts


def assembled(shapes: Shapes) -> dict[str, Assembled]:
    """What files of these shapes store in other pieces than our parameters, by the names that the tables here have."""
    made: dict[str, Assembled] = {}
    for name, shape in shapes.items():
        if match := _THREE_IN_ONE.fullmatch(name):
            if shape and shape[0] % 3 == 0:
                third = (shape[0] // 3, *shape[1:])
                made |= {
                    f"{match[1]}{one}{match[2]}": Assembled((name,), third, partial(_third, n))
                    for n, one in enumerate("qkv")
                }
        elif name in ("visual.cls_embedding", "visual.pos_embedding") and shape[:1] == (1,):
            made[name] = Assembled((name,), shape[2:] if shape[:2] == (1, 1) else shape[1:])
    for prefix in ("", PREFIX):
        for parts in _PARTS:
            length, direction = (f"{prefix}{_POSITION}{part}" for part in parts)
            shape = shapes.get(direction, ())
            if len(shape) == 3 and shapes.get(length) == (1, 1, shape[2]):
                made[f"{prefix}{_POSITION}weight"] = Assembled((length, direction), shape, _scaled)
    return made


def _third(n: int, parts: list[Tensor]) -> Tensor:
    return parts[0].chunk(3)[n]


def _scaled(parts: list[Tensor]) -> Tensor:
    """The length of each place of the kernel, over the norm of the direction that is stored there, times that."""
    length, direction = (part.to(torch.float32) for part in parts)
    return length * direction / direction.norm(dim=(0, 1), keepdim=True)
