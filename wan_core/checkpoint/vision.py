"""CLIP vision encoders on disk: the official `.pth`, which holds a text encoder too, and Hugging Face's layout, which
ComfyUI's `clip_vision_h.safetensors` and the `image_encoder` of Diffusers releases have.

The official file has queries, keys and values of a layer in one matrix. What Wan does not use is not read: the last
layer, the final norm and the projections.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from wan_core.checkpoint.detect import empty_module
from wan_core.checkpoint.opened import Checkpoint, CheckpointError, counted
from wan_core.checkpoint.reader import Source, open_checkpoint
from wan_core.checkpoint.scaled import refuse_scaled
from wan_core.models.vision.clip import VisionEncoder
from wan_core.models.vision.config import HEAD_DIM, VisionConfig

MAX_LAYERS = 200
_TOP = {
    "cls": ("embeddings.class_embedding", "cls_embedding"),
    "positions": ("embeddings.position_embedding.weight", "pos_embedding"),
    "patch.weight": ("embeddings.patch_embedding.weight", "patch_embedding.weight"),
    "norm": ("pre_layrnorm", "pre_norm"),
}
_LAYER = {
    "norm1": ("layer_norm1", "norm1"),
    "q": ("self_attn.q_proj", "attn.to_qkv"),
    "k": ("self_attn.k_proj", "attn.to_qkv"),
    "v": ("self_attn.v_proj", "attn.to_qkv"),
    "o": ("self_attn.out_proj", "attn.proj"),
    "norm2": ("layer_norm2", "norm2"),
    "fc1": ("mlp.fc1", "mlp.0"),
    "fc2": ("mlp.fc2", "mlp.2"),
}
_LAYOUTS = {  # name -> column of the tables, prefix, prefix of a layer
    "huggingface": (0, "vision_model.", "encoder.layers."),
    "official": (1, "visual.", "transformer."),
}


@dataclass(frozen=True)
class FoundVision:
    """A vision encoder that is whole. `names`: our parameter -> its tensor in the file, and which third of its rows it
    is (None: all)."""

    layout: str
    config: VisionConfig
    names: dict[str, tuple[str, int | None]]


def find_vision(checkpoint: Checkpoint) -> FoundVision:
    """What `checkpoint` holds, by names and shapes. Raises CheckpointError."""
    where = checkpoint.describe()
    refuse_scaled(checkpoint)
    for layout, (column, prefix, inner) in _LAYOUTS.items():
        start = prefix + inner
        layers = {int(m[1]) for name in checkpoint.tensors if (m := re.match(re.escape(start) + r"(\d{1,6})\.", name))}
        if not layers:
            continue
        if not 1 < max(layers) + 1 <= MAX_LAYERS:
            raise CheckpointError(f"a CLIP vision encoder of {max(layers) + 1} layers, not Wan's", where=where)
        names = dict(_names(column, prefix, inner, max(layers)))
        missing = [theirs for theirs, _ in names.values() if theirs not in checkpoint.tensors]
        if missing:
            raise CheckpointError(
                f"a CLIP vision encoder ({layout} layout), but {counted(missing, 'missing')}. Download it again.",
                where=where,
            )
        found = FoundVision(layout, _config(checkpoint, names, max(layers), where), names)
        _check_shapes(checkpoint, found, where)
        return found
    raise CheckpointError(
        "not a CLIP vision encoder. Expected is clip_vision_h.safetensors, image_encoder of a Diffusers release, or "
        "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
        where=where,
    )


def load_vision(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> VisionEncoder:
    """A vision encoder from a file, folder or state dict, in eval mode. dtype None keeps what is stored.

    Raises CheckpointError: not a whole CLIP vision encoder.
    """
    checkpoint = open_checkpoint(source)
    found = find_vision(checkpoint)
    module = empty_module(found.config)
    assert isinstance(module, VisionEncoder)
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    read = {theirs: checkpoint.read(theirs) for theirs, _ in found.names.values()}
    values = {
        ours: _part(read[theirs], third).reshape(shapes[ours]).to(device, dtype)
        for ours, (theirs, third) in found.names.items()
    }
    module.load_state_dict(values, assign=True)
    return module.requires_grad_(False).eval()


def huggingface_names(layers: int) -> dict[str, str]:
    """Our parameter -> its name in Hugging Face's layout, of an encoder whose first `layers` layers run."""
    return {ours: theirs for ours, (theirs, _) in _names(*_LAYOUTS["huggingface"], layers)}


def find_vision_file(path: str | os.PathLike[str]) -> tuple[Checkpoint, FoundVision]:
    """Open a file or folder and recognise it by its header. Raises CheckpointError."""
    checkpoint = open_checkpoint(Path(path))
    return checkpoint, find_vision(checkpoint)


def _names(column: int, prefix: str, inner: str, layers: int) -> Iterator[tuple[str, tuple[str, int | None]]]:
    """Of the first `layers` layers."""
    for ours, theirs in _TOP.items():
        for kind in ("weight", "bias") if ours == "norm" else ("",):
            dot = "." if kind else ""
            yield f"{ours}{dot}{kind}", (f"{prefix}{theirs[column]}{dot}{kind}", None)
    for n in range(layers):
        for ours, theirs in _LAYER.items():
            third = "qkv".index(ours) if theirs[column].endswith("to_qkv") else None
            for kind in ("weight", "bias"):
                yield f"layers.{n}.{ours}.{kind}", (f"{prefix}{inner}{n}.{theirs[column]}.{kind}", third)


def _config(checkpoint: Checkpoint, names: dict[str, tuple[str, int | None]], layers: int, where: str) -> VisionConfig:
    patch, fc1 = (checkpoint.tensors[names[ours][0]].shape for ours in ("patch.weight", "layers.0.fc1.weight"))
    positions = checkpoint.tensors[names["positions"][0]].shape
    if len(patch) != 4 or len(fc1) != 2 or not patch[0] or patch[0] % HEAD_DIM or not positions:
        raise CheckpointError(
            f"a CLIP vision encoder of width {patch[0] if patch else 0}; Wan's is ViT-H/14, 1280 wide", where=where
        )
    tokens = prod(positions) // patch[0]
    return VisionConfig(dim=patch[0], ffn_dim=fc1[0], num_layers=layers, patch=patch[-1], tokens=tokens)


def _check_shapes(checkpoint: Checkpoint, found: FoundVision, where: str) -> None:
    """The official class token and positions have an axis more, of one."""
    expected = empty_module(found.config).state_dict()
    wrong = []
    for ours, (theirs, third) in found.names.items():
        given, wanted = checkpoint.tensors[theirs].shape, tuple(expected[ours].shape)
        if third is not None:
            wanted = (3 * wanted[0], *wanted[1:])
        if tuple(n for n in given if n != 1) != tuple(n for n in wanted if n != 1):
            wrong.append(f"{theirs} is {list(given)}, {list(wanted)} expected")
    if wrong:
        raise CheckpointError(
            f"a CLIP vision encoder ({found.layout} layout), but {counted(wrong, 'of a wrong shape')}.",
            where=where,
        )


def _part(stored: Tensor, third: int | None) -> Tensor:
    return stored if third is None else stored.chunk(3)[third]
