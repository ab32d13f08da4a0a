"""wav2vec 2.0 speech encoders on disk: Hugging Face's layout, with or without `wav2vec2.` in front, which ComfyUI's
`wav2vec2_large_english_fp16.safetensors` has, too.

The positional convolution is stored as a direction and a length for each place of its kernel, under the names of either
of torch's two ways of doing that. What S2V does not use (masks, the words' head) is not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from wan_core.checkpoint.opened import Checkpoint, CheckpointError, counted
from wan_core.checkpoint.reader import Source, open_checkpoint
from wan_core.checkpoint.scaled import refuse_scaled
from wan_core.models.audio.config import GROUPS, HEAD_DIM, STRIDES, SpeechConfig
from wan_core.models.audio.wav2vec2 import SpeechEncoder

MAX_LAYERS = 200
PREFIX = "wav2vec2."
_POSITION = "encoder.pos_conv_embed.conv."
_LENGTH = ("weight_g", "parametrizations.weight.original0")
_DIRECTION = ("weight_v", "parametrizations.weight.original1")
_LAYER = re.compile(r"encoder\.layers\.(\d{1,6})\..+")
_EXPECTED = "Expected is wav2vec2-large-xlsr-53-english, or ComfyUI's wav2vec2_large_english_fp16.safetensors"


def load_speech(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> SpeechEncoder:
    """A speech encoder from a file, folder or state dict, in eval mode.

    Raises CheckpointError: not a whole speech encoder of this kind.
    """
    checkpoint = open_checkpoint(source)
    where = checkpoint.describe()
    stored = {name.removeprefix(PREFIX): name for name in checkpoint.tensors}
    config = find_speech(checkpoint)
    with torch.device("meta"):
        module = SpeechEncoder(config)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    length, direction = (_one_of(stored, names, where) for names in (_LENGTH, _DIRECTION))
    weight = f"{_POSITION}weight"
    missing = [name for name in shapes if name != weight and name not in stored]
    if missing:
        raise CheckpointError(f"a speech encoder, but {counted(missing, 'missing')}. Download it again.", where=where)
    values = {name: checkpoint.read(stored[name]).to(device, dtype) for name in shapes if name != weight}
    values[weight] = _position_weight(checkpoint, length, direction).to(device, dtype)
    wrong = [name for name, value in values.items() if tuple(value.shape) != shapes[name]]
    if wrong:
        raise CheckpointError(f"a speech encoder, but {counted(wrong, 'of a wrong shape')}.", where=where)
    module.load_state_dict(values, assign=True)
    return module.requires_grad_(False).eval()


def find_speech(checkpoint: Checkpoint) -> SpeechConfig:
    """What the encoder in `checkpoint` is, by names and shapes. Raises CheckpointError."""
    refuse_scaled(checkpoint)
    shapes = {name.removeprefix(PREFIX): info.shape for name, info in checkpoint.tensors.items()}
    return read_speech_config(shapes, checkpoint.describe())


def read_speech_config(shapes: Mapping[str, tuple[int, ...]], where: str) -> SpeechConfig:
    """What the encoder is whose tensors have these shapes. Raises CheckpointError."""
    layers = [int(match[1]) for name in shapes if (match := _LAYER.fullmatch(name))]
    convs = [f"feature_extractor.conv_layers.{n}.conv.weight" for n in range(len(STRIDES))]
    needed = {**dict.fromkeys(convs, 3), "encoder.layers.0.feed_forward.intermediate_dense.weight": 2}
    if not layers or max(layers) >= MAX_LAYERS or any(len(shapes.get(name, ())) != n for name, n in needed.items()):
        raise CheckpointError(f"not a wav2vec 2.0 speech encoder. {_EXPECTED}", where=where)
    normed = [f"feature_extractor.conv_layers.{n}.layer_norm.weight" in shapes for n in range(len(STRIDES))]
    ffn_dim, dim = shapes["encoder.layers.0.feed_forward.intermediate_dense.weight"]
    position = next((shapes[_POSITION + name] for name in _DIRECTION if _POSITION + name in shapes), ())
    if not all(normed) or len(position) != 3 or not dim or dim % HEAD_DIM or dim % GROUPS:
        raise CheckpointError(f"a wav2vec 2.0 speech encoder of another kind, {dim} wide. {_EXPECTED}", where=where)
    return SpeechConfig(
        dim=dim,
        ffn_dim=ffn_dim,
        num_layers=max(layers) + 1,
        conv_dim=shapes[convs[0]][0],
        kernels=tuple(shapes[name][2] for name in convs),
        position_kernel=position[2],
    )


def _one_of(stored: Mapping[str, str], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if _POSITION + name in stored:
            return stored[_POSITION + name]
    raise CheckpointError(f"a speech encoder, but {_POSITION}{names[0]} is missing. Download it again.", where=where)


def _position_weight(checkpoint: Checkpoint, length: str, direction: str) -> Tensor:
    """In float32: the length of each place of the kernel, over the norm of what is stored there, times that."""
    wide = checkpoint.read(direction).float()
    return checkpoint.read(length).float() * wide / wide.norm(dim=(0, 1), keepdim=True)
