"""What a user's `LoadOptions` mean for the files that were found and the device that is here.

Everything is known before any weights are read: `resolve_settings` raises for what cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from wan_core.checkpoint.detect import empty_module
from wan_core.checkpoint.lora.merge import Merge
from wan_core.checkpoint.staged import USUAL, Reading
from wan_core.config import EXACT, LoadOptions, OptionError
from wan_core.config.compile_cache import set_compile_caches
from wan_core.execution.memory.planning import factor, unit_bytes
from wan_core.execution.optimize import check_compile
from wan_core.models.text.umt5 import TextConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.gguf_blocks import FORMATS
from wan_core.ops.kernels.integer_weights import integer_format
from wan_core.ops.quant import int8
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.packed import PRECISION as PACKED
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.schemes import SCHEMES, resolve_scheme
from wan_core.ops.quant.swap import Quantization, swap_linears
from wan_core.pipeline.loras import Wanted, check_packed, choose_mode, lora_words, read_loras
from wan_core.pipeline.model_parts import Part, Parts, is_packed
from wan_core.sampling.cache.speed import attention_at_speed


@dataclass(frozen=True)
class PartToLoad:
    """A recognised file, and how its weights are held in memory."""

    part: Part
    dtype: torch.dtype
    quantization: Quantization | None = None
    lora_mode: str = "merge"  # of a transformer: how LoRAs are applied to it, "merge" or "attach", and why
    lora_why: str = ""

    @property
    def bytes(self) -> int:
        return self.part.bytes(self.dtype, self.quantization)

    @property
    def stays_in_file(self) -> bool:
        """Whether its weights are used as they are stored, so that they can stay in the mapped file."""
        if self.part.path is None:
            return False
        if self.quantization is None:
            return not self.part.scaled and self.part.packed is None and self.part.stored == self.dtype
        if issubclass(self.quantization.kind, Int8Linear):
            return self.part.int8_parameters >= self.part.encoded_parameters(self.quantization)
        return is_packed(self.quantization) or (self.part.scaled and self.quantization.as_stored)

    @property
    def decoded_bytes(self) -> int:
        """Host memory where weights stay in the mapped file: only unquantised blocks (`keep_blocks`) are decoded."""
        if self.quantization is None:
            return 0
        return self.part.decoded_parameters(self.quantization) * self.dtype.itemsize

    @property
    def lora_words(self) -> str:
        """How LoRAs are applied, for reports."""
        return "merged" if self.lora_mode == "merge" else f"attached: {self.lora_why}"

    @property
    def units(self) -> tuple[int, ...]:
        """Bytes of what is copied to the device as one: a transformer's or text encoder's rest, then every block."""
        config = self.part.config
        if isinstance(config, TextConfig):
            outside = config.vocab_size * config.dim * self.dtype.itemsize
            if (packed := self.part.packed) is not None and is_packed(self.quantization) and packed.fmt in FORMATS:
                outside = config.vocab_size * config.dim * packed.bytes // packed.parameters
            return (outside, *[max(0, self.bytes - outside) // config.num_layers] * config.num_layers)
        assert isinstance(config, DiTConfig)
        if not is_packed(self.quantization):
            whole_blocks = 0 if self.quantization is None else self.quantization.keep_blocks
            return unit_bytes(config, self.dtype.itemsize, self.quantization is not None, whole_blocks)
        assert self.quantization is not None
        outside, *blocks = unit_bytes(config, self.dtype.itemsize, False)
        inner = range(self.quantization.keep_blocks, len(blocks) - self.quantization.keep_blocks)
        packed = self.bytes - outside - sum(size for i, size in enumerate(blocks) if i not in inner)
        share = max(0, packed) / sum(blocks[i] for i in inner)
        return (outside, *[int(size * share) if i in inner else size for i, size in enumerate(blocks)])

    def load(self, device: torch.device, loras: Merge | None = None, how: Reading = USUAL) -> nn.Module:
        return self.part.load(device, self.dtype, self.quantization, loras, how)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How the models of a run are held and computed. `options`: what was asked for. `parts`: by name, as in
    `recognised`. `attention`: the backend that `attend` is, in runs at the word `speed`. `loras`: of each expert, in
    order."""

    options: LoadOptions
    recognised: Parts
    parts: Mapping[str, PartToLoad]
    device: torch.device
    precision: str
    precision_why: str
    attention: str
    attend: Attention
    speed: str
    loras: Mapping[str, Sequence[Wanted]]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts["high"].dtype

    def at_speed(self, speed: str) -> ModelSettings:
        """The same for runs at a word of `speed`. Raises AttentionError."""
        if speed == self.speed:
            return self
        attention, attend = find_attention(self.options.attention, self.recognised.dit, self.dtype, self.device, speed)
        return replace(self, attention=attention, attend=attend, speed=speed)

    @property
    def quantization(self) -> Quantization | None:
        """The quantisation of the transformers' linears; None: they are not quantised."""
        return self.parts["high"].quantization

    @property
    def all_loras(self) -> list[Wanted]:
        return [one for several in self.loras.values() for one in several]

    @property
    def attached_loras(self) -> list[Wanted]:
        return [
            one for name, several in self.loras.items() if self.parts[name].lora_mode == "attach" for one in several
        ]

    def check_loras(self, loras: Mapping[str, Sequence[Wanted]]) -> None:
        """Raise OptionError for one that weights which stay packed do not take. loras: by expert."""
        if is_packed(self.quantization) and self.parts["high"].lora_mode == "attach":
            check_packed((one for wanted in loras.values() for one in wanted), self.recognised.dit)

    def lora_lines(self, loras: Mapping[str, Sequence[Wanted]]) -> list[str]:
        """What was applied of each, in words. loras: by expert."""
        parts = self.parts
        return [f"{name}: {one.words(parts[name].lora_words)}" for name, wanted in loras.items() for one in wanted]

    def per_token(self) -> float:
        """Bytes of activations over 2 L C, as `planning.factor`. Without fused kernels those of plain torch."""
        config, itemsize = self.recognised.dit, self.dtype.itemsize
        kind = "cuda" if fused.why_not(self.device) is None else "cpu"
        return factor(config, itemsize=itemsize, device=kind, compile=self.options.compile, precision=self.precision)

    def describe(self) -> dict[str, Any]:
        precisions: dict[str, str] = {}
        for name, one in self.parts.items():
            precisions[name] = str(one.dtype).removeprefix("torch.")
            if one.part.packed is not None and is_packed(one.quantization):
                precisions[name] += f", {PACKED} as {one.part.packed.fmt}"
            elif self.quantization is not None and name in ("high", "low"):
                precisions[name] = self.precision
            if name in ("high", "low") and self.precision_why:
                precisions[name] += f" ({self.precision_why})"
        said: dict[str, Any] = {
            "models": {name: one.part.source for name, one in self.parts.items()},
            "precision": precisions,
            "keep_blocks": self.options.keep_blocks,
            "compile": self.options.compile,
        }
        if self.all_loras:
            said["loras"] = lora_words(self.loras)
        return said


def find_attention(
    name: str, dit: DiTConfig, dtype: torch.dtype, device: torch.device, speed: str = EXACT
) -> tuple[str, Attention]:
    """The attention of runs at a word of `speed` where `name` was asked for. Raises AttentionError."""
    name = attention_at_speed(name, speed)
    return resolve_attention(name, device, dtype, dit.head_dim, needs_lse=dit.merges_attention)


def resolve_settings(models: Parts, options: LoadOptions, device: torch.device, speed: str = EXACT) -> ModelSettings:
    """Raises OptionError or AttentionError for what cannot run on `device`, also for a LoRA that packed weights do not
    take; CheckpointError for a LoRA of another model."""
    high, low = models.of["high"], models.of.get("low")
    precision, why = precision_of(options.precision, high, device, low)
    stored = options.precision == "checkpoint"
    dtype = compute_dtype(precision, device)
    dit = models.dit
    attention, attend = find_attention(options.attention, dit, dtype, device, speed)
    quantization = find_quantization(precision, device, options.keep_blocks, as_stored=stored)
    check_quantization(quantization, dit)
    check_compile(options.compile, device)
    if options.compile != "off":
        set_compile_caches()
    parts = {
        name: PartToLoad(
            part,
            compute_dtype(options.vae_precision, device) if name == "vae" else dtype,
            holding(part, quantization, stored, device),
            *choose_mode(options.lora_mode, packed=is_packed(quantization)),
        )
        for name, part in models.of.items()
    }
    loras = read_loras(options.loras, dit, low is not None)
    settings = ModelSettings(
        options=options,
        recognised=models,
        parts=parts,
        device=device,
        precision=precision,
        precision_why=why,
        attention=attention,
        attend=attend,
        speed=speed,
        loras=loras,
    )
    settings.check_loras(loras)
    return settings


def choose_device(name: str) -> torch.device:
    """ "auto" is the first GPU, or the CPU where there is none. Raises OptionError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as fault:
        raise OptionError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:N") from fault
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        names = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        advice = f"use {names}" if count else "use cpu, or install the torch that fits your GPU"
        raise OptionError(f"device {name!r} given, but torch {torch.__version__} sees {count} NVIDIA GPUs: {advice}")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What a model computes in. "checkpoint" and "auto": bf16 on a GPU, whatever the file stores, as the reference does
    (fp16 would overflow to black frames, fp32 has no fast attention); fp32 on a CPU, which is slow at everything else.
    """
    if precision == "fp32" or (precision != "bf16" and device.type == "cpu"):
        return torch.float32
    return torch.bfloat16


def precision_of(precision: str, part: Part, device: torch.device, other: Part | None = None) -> tuple[str, str]:
    """The precision of a transformer, and why, if that needs a word: what "checkpoint" means, any other is itself.

    A packed file, or one whose `other` expert is packed, stays packed; INT8 is encoded as FP8 on cards where that is
    faster. On a GPU, a file in FP8 with scales is used as it is, and multiplied in 16 bits where one asks for that."""
    if precision != "checkpoint":
        return precision, ""
    packed = [one.packed.fmt for one in (part, other) if one is not None and one.packed is not None]
    if packed:
        stored = [integer_format(fmt) for fmt in packed]
        plain = all(fmt is not None and fmt.name == "int8_tensorwise" and not fmt.wide for fmt in stored)
        reencode, why = int8.as_fp8(device) if plain else (False, "")
        return ("fp8" if reencode and SCHEMES["fp8"].why_not(device) is None else PACKED), why
    if not part.scaled or device.type != "cuda":
        return "checkpoint", ""
    if SCHEMES["fp8"].why_not(device) is not None:
        return "fp8-weights", ""
    if part.wide or (other is not None and other.wide):
        return "fp8-weights", "its file asks for products in 16 bits; precision fp8 is faster and rounds more"
    return "fp8", ""


def holding(part: Part, quantization: Quantization | None, stored: bool, device: torch.device) -> Quantization | None:
    """How the linears of `part` are held. quantization: of transformers. stored: as the file stores them; then a text
    encoder that is packed or in FP8 stays so, as it does beside transformers in INT8."""
    if isinstance(part.config, DiTConfig):
        return quantization
    stays = stored or (quantization is not None and issubclass(quantization.kind, Int8Linear))
    return Quantization(PackedLinear, device) if stays and part.packed is not None else None


def find_quantization(
    precision: str, device: torch.device, keep_blocks: int = 0, *, as_stored: bool = False
) -> Quantization | None:
    """How `precision` holds a transformer's linears; None where it does not quantise. as_stored: linears that a file
    holds in a higher precision keep it. Raises OptionError for one that cannot run on `device`."""
    if precision == PACKED:
        return Quantization(PackedLinear, device, keep_blocks)
    scheme = resolve_scheme(precision, device)
    if scheme is None and keep_blocks:
        raise OptionError(f"{keep_blocks} blocks to keep were given, but precision {precision!r} quantises nothing")
    return None if scheme is None else Quantization(scheme.linear, device, keep_blocks, as_stored)


def check_quantization(quantization: Quantization | None, config: DiTConfig) -> None:
    """Raise OptionError where a transformer has fewer blocks than are to be kept, or matrices of unsupported shapes."""
    if quantization is not None:
        config.quantized_names(quantization.keep_blocks)
        block = replace(config, num_layers=1)  # all have the same shapes
        swap_linears(empty_module(block), quantization.kind, block.quantized_names(), torch.bfloat16)
