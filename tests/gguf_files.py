"""GGUF files for tests, written by the `gguf` package as the converters do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from wan_core.ops.kernels.gguf_blocks import FORMATS

# Where the float16 scales of a block are, by format.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
TEXT_NAMES = {
    "token_embedding": "token_embd", "norm": "enc.output_norm", "norm1": "attn_norm", "attn.q": "attn_q",
    "attn.k": "attn_k", "attn.v": "attn_v", "attn.o": "attn_o", "pos_embedding.embedding": "attn_rel_b",
    "norm2": "ffn_norm", "ffn.gate.0": "ffn_gate", "ffn.fc1": "ffn_up", "ffn.fc2": "ffn_down",
}  # fmt: skip


def random_rows(name: str, rows: int, k: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """uint8 [rows, row bytes]: random numbers in the format `name`, small ones: scales are about `scale`."""
    fmt, rng = FORMATS[name], np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * k // fmt.numbers, fmt.bytes), dtype=np.uint8)
    for at in SCALES[name]:
        halves = (scale * rng.uniform(0.5, 1.5, (len(blocks), 1)) / (32 if name.endswith(("_K", "XS")) else 1)).astype(
            np.float16
        )
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def packed_as(name: str, value: Tensor, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, the numbers that the package makes of them) of `value` where the package can encode the format, else of
    random blocks."""
    kind = Kind[name]
    try:
        data = gguf.quants.quantize(value.float().numpy(), kind)
    except NotImplementedError:
        data = random_rows(name, *value.shape, seed=seed)
    return data, gguf.quants.dequantize(data, kind)


def write(
    path: Path,
    state: Mapping[str, Tensor],
    choose: Callable[[str, Tensor], str],
    *,
    arch: str = "wan",
    notes: Mapping[str, Any] | None = None,
    rename: Callable[[str], str] = str,
) -> dict[str, Tensor]:
    """A file of `state`, each tensor in the format that `choose` says; the numbers that it holds, by the old names."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in (notes or {}).items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float64(name, value)
        else:
            writer.add_array(name, value)
    meant: dict[str, Tensor] = {}
    for seed, (name, value) in enumerate(state.items()):
        chosen = choose(name, value)
        if chosen in FORMATS:
            data, numbers = packed_as(chosen, value, seed)
        else:
            data = gguf.quants.quantize(value.float().numpy(), Kind[chosen])
            numbers = gguf.quants.dequantize(data, Kind[chosen]).reshape(value.shape)
        meant[name] = torch.from_numpy(numbers.astype(np.float32)).reshape(value.shape)
        writer.add_tensor(rename(name), data, raw_dtype=Kind[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def matrices(fmt: str) -> Callable[[str, Tensor], str]:
    """The matrices of the blocks in `fmt`, the rest in float32, as converters do it."""
    return lambda name, value: (
        fmt if name.startswith("blocks.") and name.endswith(".weight") and value.ndim == 2 else "F32"
    )


def llama_name(name: str) -> str:
    """llama.cpp's name of one of our text encoder's tensors."""
    module = name.removesuffix(".weight")
    if module.startswith("blocks."):
        _, block, module_name = module.split(".", 2)
        return f"enc.blk.{block}.{TEXT_NAMES[module_name]}.weight"
    return f"{TEXT_NAMES[module]}.weight"


def tokenizer_notes(proto: bytes) -> dict[str, Any]:
    """What llama.cpp's converter notes of a SentencePiece model."""
    pieces, scores, kinds, notes = [], [], [], {"tokenizer.ggml.model": "t5"}
    for number, value in fields(proto):
        if number == 1:
            piece = dict(fields(value))
            pieces.append(piece[1].decode())
            scores.append(float(np.frombuffer(piece.get(2, bytes(4)), np.float32)[0]))
            kinds.append(piece.get(3, 1))
        elif number == 2:
            trainer = dict(fields(value))
            notes["tokenizer.ggml.eos_token_id"] = trainer.get(42, 2)
            notes["tokenizer.ggml.padding_token_id"] = trainer.get(43, 0)
            notes["tokenizer.ggml.unknown_token_id"] = trainer.get(40, 0)
        elif number == 3:
            normalizer = dict(fields(value))
            if normalizer.get(2):
                notes["tokenizer.ggml.precompiled_charsmap"] = normalizer[2]
            notes["tokenizer.ggml.add_space_prefix"] = bool(normalizer.get(3, 1))
            notes["tokenizer.ggml.remove_extra_whitespaces"] = bool(normalizer.get(4, 1))
    return notes | {
        "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds
    }  # fmt: skip


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protocol buffer's fields."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        size = {0: 0, 1: 8, 5: 4}.get(key & 7)
        if size == 0:
            yield key >> 3, varint()
            continue
        size = varint() if size is None else size
        yield key >> 3, data[at : at + size]
        at += size
