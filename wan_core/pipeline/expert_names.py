"""Which expert a file says that it is for, by its metadata or its name, and what does not agree with how it is used.

The two experts have the same tensors, so nothing else tells them apart, and swapped files give a poor video without an
error. A name may be wrong, so what is found here is said and never refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from wan_core.checkpoint.opened import short_path
from wan_core.models.wan.config import DiTConfig

EXPERTS = ("high", "low")
# In capitals anywhere; otherwise before such a word, or at the end but for versions and precisions: not "high_detail".
_EXPERT = re.compile(
    r"(?<![A-Za-z])(?:(HIGH|LOW)(?![A-Za-z])|((?i:high|low))[ ._-]*(?:(?i:noise|expert|model|lora)"
    r"|(?:[ ._-]*(?i:v|b?fp?|rank|epoch|e|step|s)?\d+)*$))"
)
_ENDINGS = (".safetensors", ".gguf", ".pth", ".pt", ".ckpt", ".bin", ".sft")


class ExpertFile(NamedTuple):
    """A file that is used for an expert. path: None for random weights. told: the expert that it says it is for."""

    path: Path | None
    told: str | None
    by: str = "name"  # or "metadata"

    @classmethod
    def of(cls, path: Path | None, metadata: Mapping[str, str]) -> ExpertFile:
        """The file or folder of a transformer; shards and releases are named by their folder."""
        if path is None:
            return cls(None, None)
        if metadata.get("expert") in EXPERTS:
            return cls(path, metadata["expert"], "metadata")
        name = path.name.removesuffix(".index.json")
        for ending in _ENDINGS:
            name = name.removesuffix(ending)
        folder = path.parent.name
        diffusers = "low" if "transformer_2" in (name, folder) else None
        return cls(path, told_by_name(name) or told_by_name(folder) or diffusers)

    @property
    def says(self) -> str:
        assert self.path is not None
        return f"{short_path(self.path)} is for the {self.told}-noise expert by its {self.by}"


def told_by_name(name: str) -> str | None:
    """The expert that a name speaks of; None if it speaks of none or of both."""
    named = {(match[1] or match[2]).lower() for match in _EXPERT.finditer(name)}
    return named.pop() if len(named) == 1 else None


def transformer_notes(high: ExpertFile, low: ExpertFile | None, two_experts: bool) -> list[str]:
    """What the user should know of the files of a model. low: None where one file runs every step. two_experts: whether
    the model has two."""
    if low is None:
        partial = high.told is not None and two_experts
        return [f"{high.says}, and runs every step here: load the other expert's file as well"] if partial else []
    if high.path is not None and low.path is not None and high.path.resolve() == low.path.resolve():
        return [f"both experts are one file, {short_path(high.path)}: load the high-noise and the low-noise file"]
    wrong = [one for expert, one in zip(EXPERTS, (high, low), strict=True) if one.told not in (None, expert)]
    if len(wrong) == 2:
        return [f"the experts are swapped: {high.says}, {low.says}. Exchange the two files"]
    used = "high" if wrong == [high] else "low"
    return [f"the experts may be swapped: {one.says}, and is used as the {used}-noise expert" for one in wrong]


def lora_notes(used: Mapping[str, Sequence[ExpertFile]]) -> list[str]:
    """What the user should know of the LoRAs of a model with two experts. used: by expert."""
    notes = []
    for expert, other in (EXPERTS, EXPERTS[::-1]):
        for one in used.get(expert, ()):
            if one.told == other:
                notes.append(f"LoRA {one.says}, and is used for the {expert}-noise expert")
        mine = [one for one in used.get(expert, ()) if one.told == expert]
        if mine and not any(one.told == other for several in used.values() for one in several):
            lacking = f"none is for the {other}-noise expert: if it is one of a pair, add the other file"
            notes.append(f"LoRA {mine[0].says}, and {lacking}")
    return notes


def difference(high: DiTConfig, low: DiTConfig) -> str:
    """The numbers in which two architectures differ: `in_channels 16 and 36, num_layers 30 and 40`."""
    pairs = ((field.name, getattr(high, field.name), getattr(low, field.name)) for field in fields(DiTConfig))
    return ", ".join(f"{name} {one} and {two}" for name, one, two in pairs if one != two)
