"""Checkpoint -> module: one tensor at a time, without a second copy.

A module is built without values, and the tensors of the file become its parameters. On the CPU, with the dtype of the
file, those are views of the mapped file: nothing is read until it is used, and processes that load the same file
share its memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from wan_core.checkpoint.detect import TOKENIZER, Detected, detect, empty_module, number
from wan_core.checkpoint.errors import CheckpointError
from wan_core.checkpoint.layouts import Kind
from wan_core.checkpoint.opened import Checkpoint
from wan_core.checkpoint.reader import Source, open_checkpoint
from wan_core.config import DiTConfig, OptionError
from wan_core.kernels.formats import FP8, Quantized, spread_scale
from wan_core.model.dit import WanModel
from wan_core.quant.swap import Quantization, encode_values, swap_linears
from wan_core.text.tokenizer import Tokenizer
from wan_core.text.umt5 import TextEncoder, UMT5Encoder
from wan_core.vae import VideoVAE

LOADABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Parameters that the transformer computes with in float32 or converts where it uses them: they may differ from the
# matrices.
_FREE = re.compile(r"(.*\.)?modulation|head\..*|time_(embedding|projection)\..*|.*\.norm[^.]*\..*")


def load_dit(
    source: Source,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    quantization: Quantization | None = None,
) -> WanModel:
    """A transformer from a file, folder, index or state dict, in eval mode, its parameters without gradients.

    dtype None keeps what is stored. Matrices get one dtype, that of most of the file's bytes (bfloat16 for plain
    fp8); norms, modulation, time embedding and head keep their own, wider one. With a dtype, everything is converted
    to it. With a quantization, the matrices of the blocks are encoded one by one as they are read.

    Raises `CheckpointError`: not a whole Wan transformer; the message says what it is and what to do.
    """
    checkpoint = open_checkpoint(source)
    module = _filled(checkpoint, detect(checkpoint, "dit"), device, dtype, quantization)
    assert isinstance(module, WanModel)
    return module


def load_vae(source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> VideoVAE:
    """A video VAE, 2.1 or 2.2, from a file, folder or state dict, in eval mode. dtype None keeps what is stored.

    Raises `CheckpointError`: not a whole Wan VAE.
    """
    module = _load(source, "vae", device, dtype)
    assert isinstance(module, VideoVAE)
    return module


def load_text_encoder(
    source: Source,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> TextEncoder:
    """A UMT5 encoder with its tokenizer, from a file, folder or state dict, in eval mode. dtype None keeps what is
    stored.

    `tokenizer` is a spiece.model or a folder that holds one. Without it, the tokenizer is the one embedded in the
    file, or is found beside it where the official and the Diffusers release have it.

    Raises `CheckpointError`: not a whole UMT5 encoder, or no tokenizer that fits it.
    """
    checkpoint = open_checkpoint(source)
    found = detect(checkpoint, "text_encoder")
    words = _tokenizer(checkpoint, found, None if tokenizer is None else Path(tokenizer))
    encoder = _filled(checkpoint, found, device, dtype)
    assert isinstance(encoder, UMT5Encoder)
    try:
        return TextEncoder(encoder, words)
    except ValueError as fault:
        raise CheckpointError(str(fault), where=checkpoint.describe()) from fault


def _load(source: Source, kind: Kind, device: str | torch.device, dtype: torch.dtype | None) -> nn.Module:
    checkpoint = open_checkpoint(source)
    return _filled(checkpoint, detect(checkpoint, kind), device, dtype)


def _filled(
    checkpoint: Checkpoint,
    found: Detected,
    device: str | torch.device,
    dtype: torch.dtype | None,
    quantization: Quantization | None = None,
) -> nn.Module:
    if dtype is not None and dtype not in LOADABLE:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in LOADABLE)
        raise OptionError(
            f"weights of {dtype} were asked for; {allowed} are possible. Quantise after loading for less."
        )
    module = empty_module(found.config)
    names: frozenset[str] = frozenset()
    if quantization is not None:
        assert isinstance(found.config, DiTConfig)
        names = quantization.names(found.config)
        out = dtype or _main_dtype(checkpoint, found)
        if quantization.device.type == "cuda" and out != torch.bfloat16:
            raise OptionError(f"FP8 on a GPU computes in bf16, and {out} was asked for: load with dtype=torch.bfloat16")
        swap_linears(module, quantization.kind, names, out)
    values: Iterator[tuple[str, Tensor]]
    stored = _values(checkpoint, found, torch.device(device), dtype, names)
    values = _plain(stored) if quantization is None else encode_values(stored, quantization, names)
    module.load_state_dict(dict(values), assign=True)  # strict: detect has compared all names
    for name, buffer in module.named_buffers():
        assert not buffer.is_meta, f"{name} is neither stored nor computed when used"
    return module.requires_grad_(False).eval()


def read_values(
    checkpoint: Checkpoint, found: Detected, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(official name, value on `device`) of every parameter, one at a time: for who fills a module by other means."""
    return _plain(_values(checkpoint, found, device, dtype, frozenset()))


def _values(
    checkpoint: Checkpoint,
    found: Detected,
    device: torch.device,
    dtype: torch.dtype | None,
    quantized: frozenset[str],
) -> Iterator[tuple[str, Tensor | Quantized]]:
    """(official name, value), one at a time. FP8 weights with scales stay so for the linears `quantized`, and are
    multiplied out for others."""
    main = dtype or _main_dtype(checkpoint, found)
    for ours, theirs in found.names.items():
        stored = checkpoint.read(theirs)
        if ours in found.scales:
            data, scale = stored.to(device), checkpoint.read(found.scales[ours]).to(device)
            if ours.rpartition(".")[0] in quantized and data.dtype == FP8:
                yield ours, Quantized(data, scale.float())
            else:
                yield ours, (data.float() * spread_scale(scale, data.shape)).to(main)
            continue
        keep = dtype is None and found.kind == "dit" and stored.dtype in LOADABLE and _FREE.fullmatch(ours)
        yield ours, _moved(stored, device, stored.dtype if keep else main)


def _plain(values: Iterator[tuple[str, Tensor | Quantized]]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values:
        assert isinstance(value, Tensor), "only quantised linears are handed FP8"
        yield name, value


def _main_dtype(checkpoint: Checkpoint, found: Detected) -> torch.dtype:
    """The dtype of most bytes; bfloat16 if that is fp8, which only a quantised linear can compute with."""
    total: dict[torch.dtype, int] = {}
    for theirs in found.names.values():
        info = checkpoint.tensors[theirs]
        total[info.dtype] = total.get(info.dtype, 0) + info.nbytes
    main = max(total, key=lambda kind: total[kind])
    return main if main in LOADABLE else torch.bfloat16


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """On `device` with `dtype`, moving as few bytes as possible."""
    if tensor.dtype.itemsize < dtype.itemsize:
        return tensor.to(device).to(dtype)
    return tensor.to(dtype).to(device)


# ------------------------------------------------------------------------------------------------------------ tokenizer

_BESIDE = (
    "google/umt5-xxl/spiece.model",
    "spiece.model",
    "tokenizer/spiece.model",
    "../tokenizer/spiece.model",
    "../google/umt5-xxl/spiece.model",
)


def _tokenizer(checkpoint: Checkpoint, found: Detected, given: Path | None) -> Tokenizer:
    where = checkpoint.describe()
    try:
        if given is not None:
            return Tokenizer.from_file(_spiece(given))
        if TOKENIZER in found.extras:
            proto = _embedded(checkpoint.read(found.extras[TOKENIZER]))
            return Tokenizer(proto, int(number(checkpoint.metadata, "max_length", 512)))
        if checkpoint.path is not None:
            folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
            beside = next((folder / name for name in _BESIDE if (folder / name).is_file()), None)
            if beside is not None:
                return Tokenizer.from_file(beside)
    except (ValueError, OSError) as fault:
        raise CheckpointError(f"its tokenizer cannot be used: {fault}", where=where) from fault
    raise CheckpointError(
        "a text encoder without its tokenizer. Put spiece.model (from google/umt5-xxl) beside the file, or name it.",
        where=where,
    )


def _spiece(given: Path) -> Path:
    """The file itself, or the one in a folder: `tokenizer/`, `google/umt5-xxl/` or a whole release."""
    if not given.is_dir():
        return given
    return next((given / name for name in _BESIDE[:3] if (given / name).is_file()), given / "spiece.model")


def _embedded(stored: Tensor) -> bytes:
    if stored.dtype not in (torch.uint8, torch.int8) or stored.ndim != 1:
        raise ValueError(
            f"the embedded {TOKENIZER} is {stored.dtype} {list(stored.shape)}, and a list of bytes is expected"
        )
    return stored.contiguous().numpy().tobytes()
