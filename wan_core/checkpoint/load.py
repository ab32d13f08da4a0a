"""Checkpoint -> module: one tensor at a time, without a second copy.

A module is built without values, and the tensors of the file become its parameters. On the CPU, with the dtype of the
file, those are views of the mapped file: nothing is read until it is used, and processes that load the same file
share its memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wan_core.checkpoint.detect import Detected, detect, empty_module
from wan_core.checkpoint.lora.merge import Merge
from wan_core.checkpoint.opened import CheckpointError, naming
from wan_core.checkpoint.reader import Source, open_checkpoint
from wan_core.checkpoint.staged import USUAL, Reading, reading
from wan_core.checkpoint.tokenizer_file import find_tokenizer
from wan_core.config import OptionError
from wan_core.models.audio.wav2vec2 import SpeechEncoder
from wan_core.models.text.umt5 import TextEncoder, UMT5Encoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.vision.clip import VisionEncoder
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.kernels.integer_weights import integer_format
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.packed import Changed, Packed, PackedLinear, as_e4m3, holds_tables, put_packed
from wan_core.ops.quant.swap import Quantization, encoded_weight, swap_linears

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
    checkpoint = open_checkpoint(source)
    added = {key: value if isinstance(value, str) else json.dumps(value) for key, value in (metadata or {}).items()}
    detected = detect(replace(checkpoint, metadata={**checkpoint.metadata, **added}), "dit", family)
    module = _filled(detected, device, dtype, quantization, loras, how)
    assert isinstance(module, WanModel)
    return module


def load_vae(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, how: Reading = USUAL
) -> VideoVAE:
    """A video VAE, 2.1 or 2.2, from a file, folder or state dict, in eval mode. dtype None keeps what is stored.

    Raises `CheckpointError`: not a whole Wan VAE.
    """
    module = _filled(detect(source, "vae"), device, dtype, how=how)
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
    detected = detect(source, "text_encoder")
    with naming(detected.checkpoint.where):
        text_tokenizer = find_tokenizer(detected, None if tokenizer is None else Path(tokenizer))
    encoder = _filled(detected, device, dtype, quantization, how=how)
    assert isinstance(encoder, UMT5Encoder)
    try:
        return TextEncoder(encoder, text_tokenizer)
    except ValueError as fault:
        raise CheckpointError(str(fault), where=detected.checkpoint.where) from fault


def load_vision(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, how: Reading = USUAL
) -> VisionEncoder:
    """A CLIP vision encoder from a file, folder or state dict, in eval mode. dtype None keeps what is stored; half
    precision is `vision_dtype`.

    Raises `CheckpointError`: not a whole CLIP vision encoder.
    """
    half = None if dtype is None else vision_dtype(dtype)
    module = _filled(detect(source, "clip_vision"), device, half, how=how)
    assert isinstance(module, VisionEncoder)
    return module


def vision_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision of a CLIP vision encoder is float16, as it is stored and as the reference computes."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


def load_speech(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, how: Reading = USUAL
) -> SpeechEncoder:
    """A speech encoder from a file, folder or state dict, in eval mode.

    Raises `CheckpointError`: not a whole speech encoder of this kind.
    """
    module = _filled(detect(source, "audio_encoder"), device, dtype, how=how)
    assert isinstance(module, SpeechEncoder)
    return module


def _filled(
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
    module, device = empty_module(detected.config), torch.device(device)
    work = device if quantization is None or how.stays else quantization.device
    conversion = _Conversion(detected, device, work, dtype, how=how)
    main = conversion.main
    if quantization is not None and issubclass(quantization.kind, PackedLinear):
        packed, names = _staying_packed(detected, module, quantization, {} if loras is None else loras.changes)
        put_packed(module, packed.items(), main, quantization.device)
        conversion = replace(conversion, packed=packed)
        quantization = Quantization(Int8Linear, quantization.device)
    else:
        names = _encoded_names(detected, quantization)
        if quantization is not None and quantization.device.type == "cuda" and main != torch.bfloat16:
            raise OptionError(
                f"FP8 on a GPU computes in bf16, and {main} was asked for: load with dtype=torch.bfloat16"
            )
    if quantization is not None:
        swap_linears(module, quantization.kind, names, main)
    conversion = replace(conversion, quantization=quantization, quantized=names)
    only = None if how.layers is None else {name for name in detected.names if how.reads(name)}
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
    detected = detect(source, "dit")
    if detected.config != module.config:
        raise CheckpointError("another model than the one that was loaded from it", where=detected.checkpoint.where)
    encoded = _encoded_names(detected, quantization)
    conversion = _Conversion(detected, device, device, dtype, quantization, encoded, how=how)
    with torch.inference_mode(False), torch.no_grad(), closing(conversion.read(loras, names)) as values:
        for name, value in values:
            module.get_parameter(name).copy_(value)


def read_values(detected: Detected, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(official name, value on `device`) of every parameter, one at a time: for who fills a module by other means."""
    return _Conversion(detected, device, device, dtype, how=Reading(staged=False)).read(None)


class StoredValues:
    """The parameters of a transformer as a file holds them (FP8 `as_e4m3`), whatever a model in memory made of them.
    Nothing is opened before the first is asked for."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @cached_property
    def detected(self) -> Detected:
        return detect(self.source, "dit")

    def read(self, name: str) -> Tensor | Packed:
        """The parameter of an official name, on the CPU. Raises `CheckpointError`: the file is there no longer."""
        checkpoint, theirs = self.detected.checkpoint, self.detected.names[name]
        packed = self.detected.info(name).packing is not None
        return as_e4m3(checkpoint.read_packed(theirs) if packed else checkpoint.read(theirs))


@dataclass(frozen=True)
class _Conversion:
    """How the tensors of a checkpoint become parameters on `device`: the linears `quantized` are encoded by
    `quantization`, the weights of the modules `packed` stay as the file packs them, the others are numbers. work: where
    values are converted on the way (a GPU does it sooner). asked: the dtype that was asked for."""

    detected: Detected
    device: torch.device
    work: torch.device
    asked: torch.dtype | None
    quantization: Quantization | None = None
    quantized: frozenset[str] = frozenset()
    packed: Mapping[str, Packed] = field(default_factory=dict)
    how: Reading = USUAL

    @cached_property
    def main(self) -> torch.dtype:
        """The dtype of matrices: the one asked for, or that of most bytes; bfloat16 if that is fp8, which only a
        quantised linear can compute with, or packed."""
        total: dict[torch.dtype, int] = {}
        for info in map(self.detected.info, self.detected.names):
            dtype = torch.bfloat16 if info.packing else info.dtype
            total[dtype] = total.get(dtype, 0) + info.nbytes
        main = self.asked or max(total, key=lambda kind: total[kind])
        return main if main in LOADABLE else torch.bfloat16

    @property
    def reads_ahead(self) -> bool:
        """Whether weights that stay packed are read in many threads, as plain ones are, not copied from the mapping."""
        return self.device.type == self.work.type

    def read(self, loras: Merge | None, only: Collection[str] | None = None) -> Generator[tuple[str, Tensor]]:
        """(parameter name, value where it goes), one at a time, `loras` summed in. only: official names."""
        names = [name for name in self.detected.names if only is None or name in only]
        stored_names = [theirs for ours in names for theirs in self._stored_names(ours)]
        with reading(self.detected.checkpoint, stored_names, self.work, self.how) as read:
            values: Iterator[tuple[str, Any]] = ((ours, self._stored(ours, read)) for ours in names)
            if loras is not None:
                values = loras.apply(values, self.quantized, names)
            for ours, value in values:
                for name, converted in self._converted(ours, value).items():
                    yield name, converted.to(self.device)  # from the device where it was dequantised or encoded

    def _stays_packed(self, ours: str) -> bool:
        module, _, parameter = ours.rpartition(".")
        return parameter == "weight" and module in self.packed

    def _stored_names(self, ours: str) -> list[str]:
        """Names in the file that `_stored` asks its reader for, in order."""
        theirs = self.detected.names[ours]
        if self._stays_packed(ours) and not self.reads_ahead:
            return []
        return list(self.detected.checkpoint.parts.get(theirs, (theirs,)))

    def _stored(self, ours: str, read: Callable[[str], Tensor]) -> Tensor | Packed:
        """A parameter before changes. What is packed stays so, for `_converted`; but FP8 is multiplied out where no
        linear of this precision takes it."""
        theirs, (module, _, parameter) = self.detected.names[ours], ours.rpartition(".")
        is_encoded = module in self.quantized and parameter == "weight"
        packing = self.detected.info(ours).packing
        if self._stays_packed(ours) and not self.reads_ahead:
            return self.packed[module]
        if packing is None:
            stored = read(theirs)
            if is_encoded and stored.dtype not in LOADABLE:
                return as_e4m3(stored.to(self.work))
            return _moved(stored, self.work, self._dtype(ours, stored.dtype))
        value = self.detected.checkpoint.read_packed(theirs, read)
        if packing != "fp8" or self._stays_packed(ours):
            return value
        value = value.to(self.work)
        return as_e4m3(value) if is_encoded else value.dequantize(self.main)

    def _dtype(self, ours: str, stored: torch.dtype) -> torch.dtype:
        """The dtype of a parameter that is not quantised."""
        is_free = self.asked is None and self.detected.kind == "dit" and _FREE.fullmatch(ours) is not None
        return stored if is_free and stored in LOADABLE else self.main

    def _converted(self, ours: str, value: Tensor | Packed | Changed) -> Mapping[str, Tensor]:
        """Parameter name -> value, of what `_stored` gives, changes summed in."""
        module, _, parameter = ours.rpartition(".")
        if isinstance(value, Packed) and self._stays_packed(ours):
            return {f"{module}.{part}": tensor for part, tensor in value.parts.items()}
        if module in self.quantized and parameter == "weight":
            assert self.quantization is not None
            return {f"{module}.{part}": tensor for part, tensor in encoded_weight(value, self.quantization).items()}
        assert not isinstance(value, Changed), "of encoded linears alone"
        if self.detected.info(ours).packing not in (None, "fp8"):
            dtype = self._dtype(ours, torch.float32)
            value = value.to(self.work).dequantize(dtype) if isinstance(value, Packed) else value.to(dtype)
        assert isinstance(value, Tensor)
        return {ours: value}


def _staying_packed(
    detected: Detected, module: nn.Module, quantization: Quantization, changes: Collection[str]
) -> tuple[dict[str, Packed], frozenset[str]]:
    """Module -> its weight as the file packs it, FP8 with scales among others: the linears that would be quantised of a
    transformer, all linears and the embedding table of a text encoder, but none that LoRAs change. And the linears that
    are INT8 in the file and changed, which become INT8 again."""
    if isinstance(detected.config, DiTConfig):
        names = set(detected.config.quantized_names(quantization.keep_blocks))
    else:
        names = {n for n, m in module.named_modules() if isinstance(m, nn.Linear) or n == "token_embedding"}
    packed: dict[str, Packed] = {}
    int8: set[str] = set()
    for name in sorted(names):
        ours = f"{name}.weight"
        packing = detected.info(ours).packing
        if ours in changes:
            fmt = integer_format(packing or "")
            int8 |= {name} if fmt is not None and fmt.name == "int8_tensorwise" else set()
        elif isinstance(module.get_submodule(name), nn.Embedding) and not holds_tables(packing):
            continue
        elif packing is not None:
            packed[name] = detected.checkpoint.read_packed(detected.names[ours])
    return packed, frozenset(int8)


def _encoded_names(detected: Detected, quantization: Quantization | None) -> frozenset[str]:
    if quantization is None:
        return frozenset()
    assert isinstance(detected.config, DiTConfig)
    names = detected.config.quantized_names(quantization.keep_blocks)
    return _stored_so(names, detected) if quantization.as_stored else names


def _stored_so(names: frozenset[str], detected: Detected) -> frozenset[str]:
    """Those of `names` that the file holds packed, or in FP8 with a scale. Queries, keys and values of self-attention
    share a quantised input, so that they are taken together or not at all."""

    def whole(name: str) -> list[str]:
        block, _, last = name.rpartition(".")
        return [f"{block}.{part}" for part in "qkv"] if block.endswith("self_attn") and last in "qkv" else [name]

    packed = {name for name in names if detected.info(f"{name}.weight").packing is not None}
    return frozenset(name for name in names if packed.issuperset(whole(name)))


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """On `device` with `dtype`, moving as few bytes as possible."""
    if tensor.dtype.itemsize < dtype.itemsize:
        return tensor.to(device).to(dtype)
    return tensor.to(dtype).to(device)
