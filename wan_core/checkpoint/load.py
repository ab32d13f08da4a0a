"""Checkpoint -> module: one tensor at a time, without a second copy.

A module is built without values, and the tensors of the file become its parameters. On the CPU, with the dtype of the
file, those are views of the mapped file: nothing is read until it is used, and processes that load the same file
share its memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wan_core.checkpoint.detect import Detected, detect, empty_module
from wan_core.checkpoint.encoders import find_tokenizer
from wan_core.checkpoint.kept_packed import int8_names, is_read_ahead, kept_packed
from wan_core.checkpoint.lora.merge import Merge
from wan_core.checkpoint.opened import Checkpoint, CheckpointError
from wan_core.checkpoint.reader import Source, open_checkpoint
from wan_core.checkpoint.staged import USUAL, Reading, open_feed
from wan_core.config import OptionError
from wan_core.models.text.umt5 import TextEncoder, UMT5Encoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.kernels.formats import FP8, Quantized, spread_scale
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.packed import Packed, PackedLinear, put_packed
from wan_core.ops.quant.swap import Quantization, encode_values, swap_linears

LOADABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Parameters that the transformer computes with in float32 or converts where it uses them: they may differ from the
# matrices.
_FREE = re.compile(r"(.*\.)?modulation|head\..*|time_(embedding|projection)\..*|.*\.norm[^.]*\..*")


def load_dit(
    source: Source,
    metadata: Mapping[str, Any] | None = None,
    family: str | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    quantization: Quantization | None = None,
    loras: Merge | None = None,
    how: Reading = USUAL,
) -> WanModel:
    """A transformer from a file, folder, index or state dict, in eval mode, its parameters without gradients. Its
    attribute `family` says of which kind it is.

    metadata: what came with a state dict, as the header of a file has it; it is added to the file's own. family: of
    `wan_core.models.wan.families`, where tensors and metadata leave it open.
    dtype None keeps what is stored. Matrices get one dtype, that of most of the file's bytes (bfloat16 for plain
    fp8); norms, modulation, time embedding and head keep their own, wider one. With a dtype, everything is converted
    to it. With a quantization, the matrices of the blocks are encoded one by one as they are read; `loras` are summed
    in before that.

    Raises `CheckpointError`: not a whole Wan transformer; the message says what it is and what to do.
    """
    checkpoint = open_checkpoint(source).with_metadata(metadata or {})
    detected = detect(checkpoint, "dit", family)
    module = _filled(checkpoint, detected, device, dtype, quantization, loras, how)
    assert isinstance(module, WanModel)
    module.attention_preferences = {**detected.attention, **({} if loras is None else loras.attention)}
    return module


def load_vae(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, how: Reading = USUAL
) -> VideoVAE:
    """A video VAE, 2.1 or 2.2, from a file, folder or state dict, in eval mode. dtype None keeps what is stored.

    Raises `CheckpointError`: not a whole Wan VAE.
    """
    checkpoint = open_checkpoint(source)
    module = _filled(checkpoint, detect(checkpoint, "vae"), device, dtype, how=how)
    assert isinstance(module, VideoVAE)
    return module


def load_text_encoder(
    source: Source,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    quantization: Quantization | None = None,
    how: Reading = USUAL,
) -> TextEncoder:
    """A UMT5 encoder with its tokenizer, from a file, folder or state dict, in eval mode. dtype None keeps what is
    stored. quantization: that of `PackedLinear` keeps packed what the file packs; there is no other.

    `tokenizer` is a spiece.model or a folder that holds one. Without it, the tokenizer is the one embedded in the
    file, or is found beside it where the official and the Diffusers release have it.

    Raises `CheckpointError`: not a whole UMT5 encoder, or no tokenizer that fits it.
    """
    checkpoint = open_checkpoint(source)
    detected = detect(checkpoint, "text_encoder")
    text_tokenizer = find_tokenizer(checkpoint, detected, None if tokenizer is None else Path(tokenizer))
    encoder = _filled(checkpoint, detected, device, dtype, quantization, how=how)
    assert isinstance(encoder, UMT5Encoder)
    try:
        return TextEncoder(encoder, text_tokenizer)
    except ValueError as fault:
        raise CheckpointError(str(fault), where=checkpoint.describe()) from fault


def _filled(
    checkpoint: Checkpoint,
    detected: Detected,
    device: str | torch.device,
    dtype: torch.dtype | None,
    quantization: Quantization | None = None,
    loras: Merge | None = None,
    how: Reading = USUAL,
) -> nn.Module:
    if dtype is not None and dtype not in LOADABLE:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in LOADABLE)
        raise OptionError(
            f"weights of {dtype} were asked for; {allowed} are possible. Quantise after loading for less."
        )
    module = empty_module(detected.config)
    out = dtype or _main_dtype(checkpoint, detected)
    work = torch.device(device) if quantization is None else quantization.device
    if how.stays:
        work = torch.device(device)
    to = _Target(torch.device(device), work, dtype, out)
    if quantization is not None and issubclass(quantization.kind, PackedLinear):
        changed = frozenset() if loras is None else loras.changes.keys()
        packed = kept_packed(checkpoint, detected, module, quantization, changed)
        put_packed(module, packed.items(), out, quantization.device)
        # LoRAs are summed into these, and what is INT8 in the file becomes INT8 again.
        names = frozenset(int8_names(checkpoint, detected, module, quantization)) - packed.keys()
        swap_linears(module, Int8Linear, names, out)
        encoding = Quantization(Int8Linear, quantization.device) if names else None
        conversion = _Conversion(checkpoint, detected, to, encoding, names, packed, how)
    else:
        names = _encoded_names(checkpoint, detected, quantization)
        if quantization is not None:
            if quantization.device.type == "cuda" and out != torch.bfloat16:
                raise OptionError(
                    f"FP8 on a GPU computes in bf16, and {out} was asked for: load with dtype=torch.bfloat16"
                )
            swap_linears(module, quantization.kind, names, out)
        conversion = _Conversion(checkpoint, detected, to, quantization, names, how=how)
    only = None if how.layers is None else [name for name in detected.names if how.reads(name)]
    with closing(conversion.read(loras, only)) as values:
        module.load_state_dict(dict(values), assign=True, strict=only is None)  # detect has compared all names
    for name, buffer in module.named_buffers():
        assert not buffer.is_meta, f"{name} is neither stored nor computed when used"
    return module.requires_grad_(False).eval()


def read_again(
    module: WanModel,
    source: Source,
    names: Collection[str],
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    quantization: Quantization | None,
    loras: Merge | None,
    how: Reading = USUAL,
) -> None:
    """Write the parameters `names` of a transformer again, in place and wherever they are: the bits that `load_dit`
    with the same source, dtype, quantization and `loras` makes. names: official ones, those that `loras` change among
    them. device: where values are computed. Weights that stay packed are not supported.

    Raises `CheckpointError` if the file is gone or is another one, with some of the parameters written.
    """
    assert quantization is None or not issubclass(quantization.kind, PackedLinear)
    checkpoint = open_checkpoint(source)
    detected = detect(checkpoint, "dit")
    if detected.config != module.config:
        raise CheckpointError("another model than the one that was loaded from it", where=checkpoint.describe())
    to = _Target(device, device, dtype, dtype or _main_dtype(checkpoint, detected))
    encoded = _encoded_names(checkpoint, detected, quantization)
    conversion = _Conversion(checkpoint, detected, to, quantization, encoded, how=how)
    with torch.inference_mode(False), torch.no_grad(), closing(conversion.read(loras, names)) as values:
        for name, value in values:
            module.get_parameter(name).copy_(value)


def read_values(
    checkpoint: Checkpoint, found: Detected, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(official name, value on `device`) of every parameter, one at a time: for who fills a module by other means."""
    to = _Target(device, device, dtype, dtype)
    return _plain(_values(_Conversion(checkpoint, found, to), checkpoint.read))


class StoredValues:
    """The parameters of a transformer as a file holds them, whatever a model in memory made of them. Nothing is opened
    before the first is asked for."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: tuple[Checkpoint, Detected] | None = None

    def read(self, name: str) -> Tensor | Quantized | Packed:
        """The parameter of an official name, on the CPU. Raises `CheckpointError`: the file is there no longer."""
        if self.found is None:
            checkpoint = open_checkpoint(self.source)
            self.found = checkpoint, detect(checkpoint, "dit")
        checkpoint, detected = self.found
        theirs = detected.names[name]
        if checkpoint.tensors[theirs].packing is not None:
            return checkpoint.read_packed(theirs)
        stored = checkpoint.read(theirs)
        return Quantized(stored, checkpoint.read(detected.scales[name]).float()) if name in detected.scales else stored


class _Target(NamedTuple):
    """Where values go, where what is packed is widened on the way (a GPU does it sooner), the dtype that was asked for
    and the one that matrices get."""

    device: torch.device
    work: torch.device
    asked: torch.dtype | None
    main: torch.dtype


@dataclass(frozen=True)
class _Conversion:
    """How the tensors of a checkpoint become parameters: the linears `quantized` are encoded by `quantization`, the
    modules `packed` stay packed, the others are numbers."""

    checkpoint: Checkpoint
    found: Detected
    to: _Target
    quantization: Quantization | None = None
    quantized: frozenset[str] = frozenset()
    packed: Mapping[str, Packed] = field(default_factory=dict)
    how: Reading = USUAL

    def read(self, loras: Merge | None, only: Collection[str] | None = None) -> Generator[tuple[str, Tensor]]:
        """(parameter name, value where it goes), one at a time, `loras` summed in. only: official names."""
        if only is not None:
            names = {ours: theirs for ours, theirs in self.found.names.items() if ours in only}
            yield from replace(self, found=replace(self.found, names=names)).read(loras)
            return
        with open_feed(self.checkpoint, _order(self), self.to.work, self.how) as feed:
            stored = _values(self, feed.read)
            if loras is not None:
                stored = loras.apply(stored, self.quantized, self.found.names)
            stored = _widened(stored, self)
            encoding = self.quantization
            values = _plain(stored) if encoding is None else encode_values(stored, encoding, self.quantized)
            for name, value in values:  # what was dequantised or encoded on another device moves to its own now
                yield name, value.to(self.to.device)


def _values(how: _Conversion, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Any]]:
    """(official name, value), one at a time. FP8 weights with scales stay so for the linears that are quantised, and
    are multiplied out for others. What is packed stays so, for `_widened`."""
    checkpoint, detected, to = how.checkpoint, how.found, how.to
    for ours, theirs in detected.names.items():
        module = ours.rpartition(".")[0]
        if ours.endswith(".weight") and module in how.packed:
            packed, ahead = how.packed[module], is_read_ahead(to.device, to.work)
            if ahead and packed.fmt == "fp8":
                parts = {"weight": read(theirs), "weight_scale": read(detected.scales[ours]).float()}
                packed = packed._replace(parts=parts)
            elif ahead:
                packed = checkpoint.read_packed(theirs, read)
            yield ours, packed
            continue
        if checkpoint.tensors[theirs].packing is not None:
            yield ours, checkpoint.read_packed(theirs, read)
            continue
        stored = read(theirs)
        if ours in detected.scales:
            data, scale = stored.to(to.work), read(detected.scales[ours]).to(to.work)
            if module in how.quantized and data.dtype == FP8:
                yield ours, Quantized(data, scale.float())
            else:
                yield ours, (data.float() * spread_scale(scale, data.shape)).to(to.main)
            continue
        keep = to.asked is None and detected.kind == "dit" and stored.dtype in LOADABLE and _FREE.fullmatch(ours)
        yield ours, _moved(stored, to.work, stored.dtype if keep else to.main)


def _order(how: _Conversion) -> list[str]:
    """Names in the file, as `_values` asks for them."""
    checkpoint, detected = how.checkpoint, how.found
    names: list[str] = []
    for ours, theirs in detected.names.items():
        packed = ours.endswith(".weight") and ours.rpartition(".")[0] in how.packed
        if packed and not is_read_ahead(how.to.device, how.to.work):
            continue
        if checkpoint.tensors[theirs].packing is not None:
            names += checkpoint.parts.get(theirs, ())
        else:
            names += [theirs] if ours not in detected.scales else [theirs, detected.scales[ours]]
    return names


def _widened(values: Iterator[tuple[str, Any]], how: _Conversion) -> Iterator[tuple[str, Tensor | Quantized | Packed]]:
    """(parameter name, value): the parts of packed modules as they are, packed matrices of linears that are encoded
    whole, others as numbers."""
    checkpoint, detected, to = how.checkpoint, how.found, how.to
    for ours, value in values:
        module = ours.rpartition(".")[0]
        if isinstance(value, Packed) and module in how.packed:
            for part, tensor in value.parts.items():
                yield f"{module}.{part}", tensor.to(to.device)
        elif isinstance(value, Packed) and module in how.quantized:
            yield ours, value
        elif checkpoint.tensors[detected.names[ours]].packing is None:
            assert not isinstance(value, Packed)
            yield ours, value
        else:
            exact = to.asked is None and detected.kind == "dit" and _FREE.fullmatch(ours)
            encoded = module in how.quantized
            dtype = torch.float32 if exact or encoded else to.main  # what is encoded is rounded once
            numbers = value.to(to.work).dequantize(dtype) if isinstance(value, Packed) else value.to(dtype)
            yield ours, numbers if encoded else numbers.to(to.device)


def _encoded_names(checkpoint: Checkpoint, detected: Detected, quantization: Quantization | None) -> frozenset[str]:
    """The linears of a transformer that `quantization` encodes."""
    if quantization is None:
        return frozenset()
    assert isinstance(detected.config, DiTConfig)
    names = detected.config.quantized_names(quantization.keep_blocks)
    return _stored_so(names, checkpoint, detected) if quantization.as_stored else names


def _stored_so(names: frozenset[str], checkpoint: Checkpoint, detected: Detected) -> frozenset[str]:
    """Those of `names` that the file holds packed, or in FP8 with a scale. Queries, keys and values of self-attention
    share a quantised input, so that they are taken together or not at all."""

    def whole(name: str) -> list[str]:
        block, _, last = name.rpartition(".")
        return [f"{block}.{part}" for part in "qkv"] if block.endswith("self_attn") and last in "qkv" else [name]

    def stored(name: str) -> bool:
        return name in detected.scales or checkpoint.tensors[detected.names[name]].packing is not None

    return frozenset(name for name in names if all(stored(f"{part}.weight") for part in whole(name)))


def _plain(values: Iterator[tuple[str, Tensor | Quantized | Packed]]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values:
        assert isinstance(value, Tensor), "only quantised linears are handed FP8"
        yield name, value


def _main_dtype(checkpoint: Checkpoint, detected: Detected) -> torch.dtype:
    """The dtype of most bytes; bfloat16 if that is fp8, which only a quantised linear can compute with, or packed."""
    total: dict[torch.dtype, int] = {}
    for theirs in detected.names.values():
        info = checkpoint.tensors[theirs]
        dtype = torch.bfloat16 if info.packing else info.dtype
        total[dtype] = total.get(dtype, 0) + info.nbytes
    main = max(total, key=lambda kind: total[kind])
    return main if main in LOADABLE else torch.bfloat16


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """On `device` with `dtype`, moving as few bytes as possible."""
    if tensor.dtype.itemsize < dtype.itemsize:
        return tensor.to(device).to(dtype)
    return tensor.to(dtype).to(device)
