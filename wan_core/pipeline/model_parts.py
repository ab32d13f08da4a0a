"""The parts of a model as they were recognised, before they are loaded: what each is, where it comes from, its size.

The two experts have the same tensors, so that swapped files give a poor video without an error. Metadata or a file's
name may say which expert it is for (`ExpertFile`). A name may be wrong, so what it says is noted and never refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn

from wan_core.checkpoint import Checkpoint
from wan_core.checkpoint.detect import Config, expected_shapes
from wan_core.checkpoint.lora.merge import Merge
from wan_core.checkpoint.opened import short_path
from wan_core.checkpoint.staged import USUAL, Reading
from wan_core.config.file_names import EXPERTS, file_says
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import TASKS, Task
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.swap import Quantization
from wan_core.sampling.build import ModelFacts


class Loader(Protocol):
    """Reads a part; a quantization and LoRAs to sum in are for transformers."""

    def __call__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        loras: Merge | None = None,
        how: Reading = USUAL,
        /,
    ) -> nn.Module: ...


class PackedSize(NamedTuple):
    """`fmt`: the format of most bytes, for people; `bytes` as they are stored and the `parameters` that these are."""

    fmt: str
    bytes: int
    parameters: int


def is_packed(quantization: Quantization | None) -> bool:
    return quantization is not None and issubclass(quantization.kind, PackedLinear)


def matrix_parameters(config: DiTConfig, keep_blocks: int = 0) -> int:
    """Number of parameters of the linears that are quantised in a transformer."""
    shapes = expected_shapes(config)
    return sum(prod(shapes[f"{name}.weight"]) for name in config.quantized_names(keep_blocks))


@dataclass(frozen=True)
class Part:
    """One model before it is loaded: what it is, and how to get it."""

    source: str
    config: Config
    stored: torch.dtype
    parameters: int
    load: Loader
    scaled: bool = False  # stored in FP8 with scales
    wide: bool = False  # its file asks for products in 16 bits all the same
    path: Path | None = None  # of its file or folder
    memory: Checkpoint | None = None  # the weights of another program's model, where no file is known
    metadata: Mapping[str, str] = field(default_factory=dict)  # of its file
    packed: PackedSize | None = None  # of what may stay packed in memory, None if nothing is
    stored_bytes: int = 0  # of its tensors in the files; 0 for random weights
    quantized_parameters: int = 0  # of matrices of the blocks that are stored packed, or in FP8 with scales
    int8_parameters: int = 0  # of those, in INT8 as `Int8Linear` has it

    def bytes(self, dtype: torch.dtype, quantization: Quantization | None = None) -> int:
        if quantization is not None and is_packed(quantization):
            size = self.packed or PackedSize("", 0, 1)
            decoded = self.decoded_parameters(quantization)
            packed = size.bytes * (size.parameters - decoded) // size.parameters
            return packed + (self.parameters - size.parameters + decoded) * dtype.itemsize
        if quantization is None or not isinstance(self.config, DiTConfig):
            return self.parameters * dtype.itemsize
        encoded = self.encoded_parameters(quantization)
        return encoded + (self.parameters - encoded) * dtype.itemsize

    def encoded_parameters(self, quantization: Quantization) -> int:
        """Number of parameters of a transformer that `quantization` encodes."""
        assert isinstance(self.config, DiTConfig)
        encoded = matrix_parameters(self.config, quantization.keep_blocks)
        return min(encoded, self.quantized_parameters) if quantization.as_stored else encoded

    def decoded_parameters(self, quantization: Quantization) -> int:
        """Number of parameters of a transformer that are packed in the file, or FP8 with scales, and lie in the blocks
        that `quantization` leaves unquantised. Matrices that the file has in a higher precision count as such
        blocks."""
        if not quantization.keep_blocks:
            return 0
        assert isinstance(self.config, DiTConfig)
        return max(0, self.quantized_parameters - matrix_parameters(self.config, quantization.keep_blocks))


@dataclass(frozen=True)
class Parts:
    """The models of a task by name: high, low (absent where one transformer runs every step), text_encoder, vae,
    clip_vision (where the task needs it); or its transformers alone. Of one transformer of a task with two experts, the
    boundary is 0.

    vae: the architecture whose latents they work on. why: what decided which task it is, where tensors do not. speech:
    the encoder of sound of a task that takes some, which is loaded while it is used."""

    task: Task
    of: Mapping[str, Part]
    vae: VAEConfig
    why: str = ""
    speech: Part | None = None

    @property
    def high(self) -> Part:
        """The high-noise expert, or the only transformer."""
        return self.of["high"]

    @property
    def low(self) -> Part | None:
        return self.of.get("low")

    @property
    def dit(self) -> DiTConfig:
        return cast(DiTConfig, self.high.config)

    @property
    def low_path(self) -> Path | None:
        return None if self.low is None else self.low.path

    def facts(self, loras: Sequence[Path], all_files: bool = True) -> ModelFacts:
        """What a plan depends on. loras: files on either expert. all_files: there are no others."""
        return ModelFacts(
            task=self.task,
            dit=self.dit,
            vae=self.vae,
            high=self.high.path,
            low=self.low_path,
            loras=tuple(loras),
            all_files=all_files,
        )

    @property
    def notes(self) -> list[str]:
        """What the user should know of the transformers' files: swapped, or one for both."""
        high, low = (None if one is None else ExpertFile.of(one.path, one.metadata) for one in (self.high, self.low))
        assert high is not None
        return transformer_notes(high, low, self.task.two_experts or TASKS[self.task.name].two_experts)


class ExpertFile(NamedTuple):
    """A file that is used for an expert. path: None for random weights. expert: the one that it says it is for."""

    path: Path | None
    expert: str | None
    by: str = "name"  # or "metadata"

    @classmethod
    def of(cls, path: Path | None, metadata: Mapping[str, str]) -> ExpertFile:
        """The file or folder of a transformer; shards and releases are named by their folder."""
        if path is None:
            return cls(None, None)
        said = file_says(path, metadata)
        return cls(path, said.expert, said.expert_by)

    @property
    def says(self) -> str:
        assert self.path is not None
        return f"{short_path(self.path)} is for the {self.expert}-noise expert by its {self.by}"


def transformer_notes(high: ExpertFile, low: ExpertFile | None, two_experts: bool) -> list[str]:
    """What the user should know of the files of a model. low: None where one file runs every step. two_experts: whether
    the model has two."""
    if low is None:
        partial = high.expert is not None and two_experts
        return [f"{high.says}, and runs every step here: load the other expert's file as well"] if partial else []
    if high.path is not None and low.path is not None and high.path.resolve() == low.path.resolve():
        return [f"both experts are one file, {short_path(high.path)}: load the high-noise and the low-noise file"]
    wrong = [one for expert, one in zip(EXPERTS, (high, low), strict=True) if one.expert not in (None, expert)]
    if len(wrong) == 2:
        return [f"the experts are swapped: {high.says}, {low.says}. Exchange the two files"]
    used = "high" if wrong == [high] else "low"
    return [f"the experts may be swapped: {one.says}, and is used as the {used}-noise expert" for one in wrong]
