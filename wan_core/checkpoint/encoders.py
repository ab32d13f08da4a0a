"""Encoders on disk that serve a family: CLIP vision (image-to-video of 2.1, Animate, Fun) and wav2vec 2.0 (S2V). Also
where the tokenizer of a text encoder comes from: the file itself, or spiece.model beside it.

CLIP: the official `.pth`, which holds a text encoder too and has queries, keys and values of a layer in one matrix, and
Hugging Face's layout, which ComfyUI's `clip_vision_h.safetensors` and the `image_encoder` of Diffusers releases have.
What Wan does not use is not read: the last layer, the final norm and the projections.

wav2vec 2.0: Hugging Face's layout, with or without `wav2vec2.` in front, which ComfyUI's
`wav2vec2_large_english_fp16.safetensors` has, too. The positional convolution is stored as a direction and a length for
each place of its kernel, under the names of either of torch's two ways of doing that. Masks and the words' head are not
read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from wan_core.checkpoint.detect import TOKENIZER, Detected, empty_module
from wan_core.checkpoint.opened import Checkpoint, CheckpointError, counted, naming
from wan_core.checkpoint.reader import Source, open_checkpoint
from wan_core.models.audio.wav2vec2 import GROUPS, STRIDES, SpeechConfig, SpeechEncoder
from wan_core.models.audio.wav2vec2 import HEAD_DIM as SPEECH_HEAD_DIM
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.vision.clip import HEAD_DIM, VisionConfig, VisionEncoder
from wan_core.models.wan.families.plain import number

MAX_LAYERS = 200

# ------------------------------------------------------------------------------------------------------- CLIP vision

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
    with naming(checkpoint.where):
        return _find_vision(checkpoint)


def _find_vision(checkpoint: Checkpoint) -> FoundVision:
    for layout, (column, prefix, inner) in _LAYOUTS.items():
        start = prefix + inner
        layers = {int(m[1]) for name in checkpoint.tensors if (m := re.match(re.escape(start) + r"(\d{1,6})\.", name))}
        if not layers:
            continue
        if not 1 < max(layers) + 1 <= MAX_LAYERS:
            raise CheckpointError(f"a CLIP vision encoder of {max(layers) + 1} layers, not Wan's")
        names = dict(_names(column, prefix, inner, max(layers)))
        missing = [theirs for theirs, _ in names.values() if theirs not in checkpoint.tensors]
        if missing:
            raise CheckpointError(
                f"a CLIP vision encoder ({layout} layout), but {counted(missing, 'missing')}. Download it again."
            )
        vision = FoundVision(layout, _config(checkpoint, names, max(layers)), names)
        _check_shapes(checkpoint, vision)
        return vision
    raise CheckpointError(
        "not a CLIP vision encoder. Expected is clip_vision_h.safetensors, image_encoder of a Diffusers release, or "
        "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    )


def load_vision(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> VisionEncoder:
    """A vision encoder from a file, folder or state dict, in eval mode. dtype None keeps what is stored.

    Raises CheckpointError: not a whole CLIP vision encoder.
    """
    checkpoint = open_checkpoint(source)
    vision = find_vision(checkpoint)
    module = empty_module(vision.config)
    assert isinstance(module, VisionEncoder)
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    read = {theirs: checkpoint.read(theirs) for theirs, _ in vision.names.values()}
    values = {
        ours: (read[theirs] if third is None else read[theirs].chunk(3)[third]).reshape(shapes[ours]).to(device, dtype)
        for ours, (theirs, third) in vision.names.items()
    }
    module.load_state_dict(values, assign=True)
    return module.requires_grad_(False).eval()


def find_vision_file(path: str | os.PathLike[str]) -> tuple[Checkpoint, FoundVision]:
    """Open a file or folder and recognise it by its header. Raises CheckpointError."""
    checkpoint = open_checkpoint(Path(path))
    return checkpoint, find_vision(checkpoint)


def _names(column: int, prefix: str, inner: str, layers: int) -> Iterator[tuple[str, tuple[str, int | None]]]:
    """Our parameter -> its tensor in the file, in the first `layers` layers."""
    for ours, theirs in _TOP.items():
        for kind in ("weight", "bias") if ours == "norm" else ("",):
            dot = "." if kind else ""
            yield f"{ours}{dot}{kind}", (f"{prefix}{theirs[column]}{dot}{kind}", None)
    for n in range(layers):
        for ours, theirs in _LAYER.items():
            third = "qkv".index(ours) if theirs[column].endswith("to_qkv") else None
            for kind in ("weight", "bias"):
                yield f"layers.{n}.{ours}.{kind}", (f"{prefix}{inner}{n}.{theirs[column]}.{kind}", third)


def _config(checkpoint: Checkpoint, names: dict[str, tuple[str, int | None]], layers: int) -> VisionConfig:
    patch, fc1 = (checkpoint.tensors[names[ours][0]].shape for ours in ("patch.weight", "layers.0.fc1.weight"))
    positions = checkpoint.tensors[names["positions"][0]].shape
    if len(patch) != 4 or len(fc1) != 2 or not patch[0] or patch[0] % HEAD_DIM or not positions:
        raise CheckpointError(
            f"a CLIP vision encoder of width {patch[0] if patch else 0}; Wan's is ViT-H/14, 1280 wide"
        )
    tokens = prod(positions) // patch[0]
    return VisionConfig(dim=patch[0], ffn_dim=fc1[0], num_layers=layers, patch=patch[-1], tokens=tokens)


def _check_shapes(checkpoint: Checkpoint, vision: FoundVision) -> None:
    """The official class token and positions have an axis more, of one."""
    expected = empty_module(vision.config).state_dict()
    wrong = []
    for ours, (theirs, third) in vision.names.items():
        stored, wanted = checkpoint.tensors[theirs].shape, tuple(expected[ours].shape)
        if third is not None:
            wanted = (3 * wanted[0], *wanted[1:])
        if tuple(n for n in stored if n != 1) != tuple(n for n in wanted if n != 1):
            wrong.append(f"{theirs} is {list(stored)}, {list(wanted)} expected")
    if wrong:
        raise CheckpointError(
            f"a CLIP vision encoder ({vision.layout} layout), but {counted(wrong, 'of a wrong shape')}."
        )


# ------------------------------------------------------------------------------------------------------- wav2vec 2.0

PREFIX = "wav2vec2."
_POSITION = "encoder.pos_conv_embed.conv."
_LENGTH = ("weight_g", "parametrizations.weight.original0")
_DIRECTION = ("weight_v", "parametrizations.weight.original1")
_SPEECH_LAYER = re.compile(r"encoder\.layers\.(\d{1,6})\..+")
_EXPECTED = "Expected is wav2vec2-large-xlsr-53-english, or ComfyUI's wav2vec2_large_english_fp16.safetensors"


def load_speech(source: Source, *, device: str | torch.device = "cpu") -> SpeechEncoder:
    """A speech encoder from a file, folder or state dict, in eval mode, in float32.

    Raises CheckpointError: not a whole speech encoder of this kind.
    """
    checkpoint = open_checkpoint(source)
    with naming(checkpoint.where):
        return _load_speech(checkpoint, device)


def _load_speech(checkpoint: Checkpoint, device: str | torch.device) -> SpeechEncoder:
    stored = {name.removeprefix(PREFIX): name for name in checkpoint.tensors}
    module = empty_module(find_speech(checkpoint))
    assert isinstance(module, SpeechEncoder)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    length, direction = (_one_of(stored, names) for names in (_LENGTH, _DIRECTION))
    weight = f"{_POSITION}weight"
    missing = [name for name in shapes if name != weight and name not in stored]
    if missing:
        raise CheckpointError(f"a speech encoder, but {counted(missing, 'missing')}. Download it again.")
    values = {name: checkpoint.read(stored[name]).to(device, torch.float32) for name in shapes if name != weight}
    # the length of each place of the kernel, over the norm of the direction that is stored there, times that
    wide = checkpoint.read(direction).float()
    position = checkpoint.read(length).float() * wide / wide.norm(dim=(0, 1), keepdim=True)
    values[weight] = position.to(device)
    wrong = [name for name, value in values.items() if tuple(value.shape) != shapes[name]]
    if wrong:
        raise CheckpointError(f"a speech encoder, but {counted(wrong, 'of a wrong shape')}.")
    module.load_state_dict(values, assign=True)
    return module.requires_grad_(False).eval()


def find_speech(checkpoint: Checkpoint) -> SpeechConfig:
    """What the encoder in `checkpoint` is, by names and shapes. Raises CheckpointError."""
    shapes = {name.removeprefix(PREFIX): info.shape for name, info in checkpoint.tensors.items()}
    with naming(checkpoint.where):
        return _speech_config(shapes)


def _speech_config(shapes: Mapping[str, tuple[int, ...]]) -> SpeechConfig:
    layers = [int(match[1]) for name in shapes if (match := _SPEECH_LAYER.fullmatch(name))]
    convs = [f"feature_extractor.conv_layers.{n}.conv.weight" for n in range(len(STRIDES))]
    needed = {**dict.fromkeys(convs, 3), "encoder.layers.0.feed_forward.intermediate_dense.weight": 2}
    if not layers or max(layers) >= MAX_LAYERS or any(len(shapes.get(name, ())) != n for name, n in needed.items()):
        raise CheckpointError(f"not a wav2vec 2.0 speech encoder. {_EXPECTED}")
    normed = [f"feature_extractor.conv_layers.{n}.layer_norm.weight" in shapes for n in range(len(STRIDES))]
    ffn_dim, dim = shapes["encoder.layers.0.feed_forward.intermediate_dense.weight"]
    position = next((shapes[_POSITION + name] for name in _DIRECTION if _POSITION + name in shapes), ())
    if not all(normed) or len(position) != 3 or not dim or dim % SPEECH_HEAD_DIM or dim % GROUPS:
        raise CheckpointError(f"a wav2vec 2.0 speech encoder of another kind, {dim} wide. {_EXPECTED}")
    return SpeechConfig(
        dim=dim,
        ffn_dim=ffn_dim,
        num_layers=max(layers) + 1,
        conv_dim=shapes[convs[0]][0],
        kernels=tuple(shapes[name][2] for name in convs),
        position_kernel=position[2],
    )


def _one_of(stored: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        if _POSITION + name in stored:
            return stored[_POSITION + name]
    raise CheckpointError(f"a speech encoder, but {_POSITION}{names[0]} is missing. Download it again.")


# -------------------------------------------------------------------------------------------- the tokenizer of UMT5

_BESIDE = (
    "google/umt5-xxl/spiece.model",
    "spiece.model",
    "tokenizer/spiece.model",
    "../tokenizer/spiece.model",
    "../google/umt5-xxl/spiece.model",
)


def find_tokenizer(checkpoint: Checkpoint, detected: Detected, path: Path | None) -> Tokenizer:
    """The tokenizer of an encoder. path: a spiece.model or a folder that holds one. Raises `CheckpointError`."""
    try:
        if path is not None:
            return Tokenizer.from_file(_spiece(path))
        if checkpoint.tokenizer is not None:
            return Tokenizer(checkpoint.tokenizer())
        if TOKENIZER in detected.extras:
            proto = _embedded(checkpoint.read(detected.extras[TOKENIZER]))
            return Tokenizer(proto, int(number(checkpoint.metadata, "max_length", 512)))
        if checkpoint.path is not None:
            folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
            tokenizer_file = next((folder / name for name in _BESIDE if (folder / name).is_file()), None)
            if tokenizer_file is not None:
                return Tokenizer.from_file(tokenizer_file)
    except (ValueError, OSError) as fault:
        raise CheckpointError(f"its tokenizer cannot be used: {fault}") from fault
    raise CheckpointError(
        "a text encoder without its tokenizer. Put spiece.model (from google/umt5-xxl) beside the file, or name it."
    )


def _spiece(path: Path) -> Path:
    """The file itself, or the one in a folder: `tokenizer/`, `google/umt5-xxl/` or a whole release."""
    if not path.is_dir():
        return path
    return next((path / name for name in _BESIDE[:3] if (path / name).is_file()), path / "spiece.model")


def _embedded(stored: Tensor) -> bytes:
    if stored.dtype not in (torch.uint8, torch.int8) or stored.ndim != 1:
        raise ValueError(
            f"the embedded {TOKENIZER} is {stored.dtype} {list(stored.shape)}, and a list of bytes is expected"
        )
    return stored.contiguous().numpy().tobytes()
