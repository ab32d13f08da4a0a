"""LoRAs of a run: which file changes which expert, how strongly, and how it is applied.

There are two ways.

merge    summed into the weights, in float32 and before they are quantised: costs nothing while the model runs. Weights
         that the file has in FP8 or INT8 are rounded again so that small changes are not lost
         (`wan_core.ops.quant.changed`). Other strengths, other LoRAs and none: the parameters that
         change are read again from the file (`wan_core.pipeline.applied_loras`)
attach   added to the result: each linear adds a product of low rank to its own (`wan_core.ops.quant.linear`). The
         strength is a number on the device, and changing it reads, compiles and captures nothing again. What is no
         product of low rank, or no linear that is called as one (norms, modulation, differences in full, DoRA), is
         summed into its parameter in place, and what was there is kept on the host

`auto` merges, and attaches where weights stay packed (GGUF, NVFP4, MXFP8): these are not encoded again.

Attached matrices stay on the device, also where the weights stream. What is summed into a parameter is then written
into its host copy: all weights must be in host memory while `ModelLoras.apply` runs (`writes_weights`).

Either way parameters keep their names, and taking a LoRA away leaves every bit as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.merge import Change, Merge
from wan_core.checkpoint.lora.names import told_experts
from wan_core.checkpoint.lora.read import Lora, read_lora
from wan_core.checkpoint.reader import open_checkpoint
from wan_core.config import LoraOptions, OptionError
from wan_core.config.file_names import EXPERTS, read_name
from wan_core.models.wan.config import DiTConfig
from wan_core.pipeline.model_parts import ExpertFile
from wan_core.sampling.steps import Expert, LoraShare, lora_share


@dataclass(frozen=True, eq=False)
class Wanted:
    """A LoRA for one expert. `key` changes when the file does."""

    lora: Lora
    strength: float
    key: tuple[str, int, int]
    file: ExpertFile | None = None  # which expert its file is for

    def words(self, how: str) -> str:
        """The line for the report: what was applied, what was ignored and why."""
        return f"LoRA {self.lora.where} ({how}, strength {self.strength:g}): {self.lora.words()}"


def expert_file(path: Path, metadata: Mapping[str, str], tensors: Collection[str] = ()) -> ExpertFile:
    """Which expert a LoRA's file is for, by its metadata, else the names of its tensors, else its own name."""
    if metadata.get("expert") in EXPERTS:
        return ExpertFile(path, metadata["expert"], "metadata")
    named = told_experts(tensors)
    if named:
        return ExpertFile(path, named[0] if len(named) == 1 else None, "tensors")
    return ExpertFile(path, read_name(path.name).expert)


def read_loras(loras: Sequence[LoraOptions], config: DiTConfig, two_experts: bool) -> dict[str, list[Wanted]]:
    """Expert -> its LoRAs in order. A model of one transformer has all of them under "high".

    Raises CheckpointError: no LoRA, or of another model; OptionError: one for an expert that there is not.
    """
    by_expert: dict[str, list[Wanted]] = {expert: [] for expert in (EXPERTS if two_experts else EXPERTS[:1])}
    shapes = expected_shapes(config) if loras else {}
    for options in loras:
        path = Path(options.path)
        if not two_experts and options.expert == "low":
            raise OptionError(f"{path.name} is given for the low-noise expert, and this model has one transformer only")
        checkpoint = open_checkpoint(path)
        file = expert_file(path, checkpoint.metadata, checkpoint.tensors)
        meant = file.expert if options.expert == "auto" else options.expert
        for expert, wanted in by_expert.items():
            if two_experts and meant not in (None, expert):
                continue
            lora = read_lora(checkpoint, shapes, expert if two_experts else None)
            stat = path.stat()
            wanted.append(Wanted(lora, options.strength, (str(path), stat.st_mtime_ns, stat.st_size), file))
    return by_expert


def shared(wanted: Sequence[Wanted], expert: str, loras: Sequence[LoraShare]) -> tuple[Wanted, ...]:
    """`wanted` of an expert in a step that has `loras`: each at that share of its strength. One of strength 0 is left
    out; one whose share is 0 stays, as it has another in other steps of the run."""
    name: Expert = "low" if expert == "low" else "high"
    wanted = [one for one in wanted if one.strength]
    shares = [lora_share(loras, name, one.key[0]) for one in wanted]
    return tuple(
        one if share == 1 else replace(one, strength=one.strength * share)
        for one, share in zip(wanted, shares, strict=True)
    )


def notes_of(loras: Mapping[str, Sequence[Wanted]]) -> list[str]:
    """What the user should know of the LoRAs of each expert: files for the other one, and half of a pair."""
    used = {name: [one.file for one in wanted if one.strength and one.file] for name, wanted in loras.items()}
    return lora_notes(used) if set(EXPERTS) <= used.keys() else []


def lora_notes(used: Mapping[str, Sequence[ExpertFile]]) -> list[str]:
    """What the user should know of the LoRAs of a model with two experts. used: by expert."""
    notes = []
    for expert, other in (EXPERTS, EXPERTS[::-1]):
        for one in used.get(expert, ()):
            if one.expert == other:
                notes.append(f"LoRA {one.says}, and is used for the {expert}-noise expert")
        mine = [one for one in used.get(expert, ()) if one.expert == expert]
        if mine and not any(one.expert == other for several in used.values() for one in several):
            lacking = f"none is for the {other}-noise expert: if it is one of a pair, add the other file; if it is for "
            lacking += "both, give it for both (inputs high and low, --lora high=FILE and --lora low=FILE)"
            notes.append(f"LoRA {mine[0].says}, and {lacking}")
    return notes


def lora_files(loras: Iterable[LoraOptions]) -> tuple[Path, ...]:
    """Those that count for something."""
    return tuple(Path(options.path) for options in loras if options.strength)


def choose_mode(mode: str, *, packed: bool) -> tuple[str, str]:
    """How LoRAs are applied, and why. packed: the weights stay as their file packs them."""
    if mode != "auto":
        return mode, "asked for"
    return ("attach", "the weights stay packed") if packed else ("merge", "costs nothing while the model runs")


def lora_words(loras: Mapping[str, Sequence[Wanted]]) -> dict[str, str]:
    """By expert, for reports."""
    return {
        expert: ", ".join(f"{one.lora.where} {one.strength:g}" for one in wanted)
        for expert, wanted in loras.items()
        if wanted
    }


MERGE = "merge it while they are read (--lora-mode merge)"


def check_packed(wanted: Iterable[Wanted], config: DiTConfig, do: str = MERGE) -> None:
    """Raise OptionError where a LoRA would have to be summed into weights that stay packed. do: what helps."""
    linears = {f"{name}.weight" for name in config.quantized_names()}
    for one in wanted:
        sums = [
            n for n, several in one.lora.changes.items() if n in linears and not all(c.has_low_rank for c in several)
        ]
        if sums:
            kind = next(c.words for c in one.lora.changes[sums[0]] if not c.has_low_rank)
            raise OptionError(
                f"LoRA {one.lora.where} changes {sums[0]} and {len(sums) - 1} more by {kind}: no product of low "
                f"rank, has to be summed in, and weights of this file stay packed: {do}, or use a file of 16 bits"
            )


def merging(wanted: Iterable[Wanted], device: torch.device) -> Merge | None:
    """The changes to sum into weights while they are read; None where there are none. Strength 0 changes nothing."""
    changes: dict[str, tuple[tuple[Change, float], ...]] = {}
    for one in (one for one in wanted if one.strength):
        for name, several in one.lora.changes.items():
            changes[name] = (*changes.get(name, ()), *((change, one.strength) for change in several))
    return Merge(changes, device) if changes else None


def attachable(config: DiTConfig) -> frozenset[str]:
    """Linears that the model calls as such, so that something beside their weight has an effect."""
    return config.quantized_names() | {"text_embedding.0", "text_embedding.2"}


def lora_bytes(wanted: Iterable[Wanted]) -> int:
    """Device memory of attached LoRAs, in 16 bits. One of strength 0 is not attached."""
    wanted = [one for one in wanted if one.strength]
    changes = (change for one in wanted for several in one.lora.changes.values() for change in several)
    return sum(2 * change.attached_numbers for change in changes)
