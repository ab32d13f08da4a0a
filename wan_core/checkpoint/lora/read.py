"""`read_lora`: read a LoRA file and match it with a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from wan_core.checkpoint.attention_preferences import SUFFIX, preference_note
from wan_core.checkpoint.errors import CheckpointError, listing
from wan_core.checkpoint.lora.change import Change
from wan_core.checkpoint.lora.names import (
    OTHER_EXPERT,
    TEXT_ENCODER,
    UNKNOWN_FORM,
    UNKNOWN_MODULE,
    UNSUPPORTED,
    Finder,
    for_other_expert,
    for_text_encoder,
    is_lora,
    parse_name,
    spelling_words,
)
from wan_core.checkpoint.lora.pairing import ModuleParts, PeftSettings, Shapes
from wan_core.checkpoint.opened import Checkpoint
from wan_core.checkpoint.reader import Source, open_checkpoint


@dataclass(frozen=True, kw_only=True, eq=False)
class Lora:
    """A LoRA file, matched with a model. `changes`: official parameter name -> its changes, in order. `ignored`: reason
    -> names of tensors that have no effect. `attention`: official attention module -> which attention the file asks
    ComfyUI for."""

    where: str
    spelling: str  # "diffusion_model., lora_down/lora_up"
    changes: Mapping[str, tuple[Change, ...]]
    ignored: Mapping[str, tuple[str, ...]]
    metadata: Mapping[str, str]
    attention: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Kind -> number of changes."""
        counts: dict[str, int] = {}
        for change in (c for changes in self.changes.values() for c in changes):
            counts[change.words] = counts.get(change.words, 0) + 1
        return counts

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The distinct ranks of its LoRAs, in ascending order."""
        return tuple(sorted({c.rank for changes in self.changes.values() for c in changes if c.rank is not None}))

    def words(self) -> str:
        """One line: the changes, and the ignored tensors with the reason."""
        ranks = f" of rank {'/'.join(map(str, self.ranks))}" if self.ranks else ""
        kinds = ", ".join(
            f"{count} {kind}{ranks if kind.startswith('LoRA') else ''}" for kind, count in self.kinds.items()
        )
        ignored = "; ".join(
            f"{len(names)} tensors ignored, {why} ({listing(names, 2)})" for why, names in self.ignored.items()
        )
        changed = f"{kinds} on {len(self.changes)} parameters ({self.spelling})"
        return "; ".join(part for part in (changed, ignored, preference_note(self.attention)) if part)


def read_lora(source: Source, shapes: Shapes, expert: str | None = None) -> Lora:
    """The LoRA in `source`, for a model with the official parameters `shapes`; its values are mapped, not read.

    expert: "high" or "low", needed if one file has changes for both. Tensors that do not fit are in `ignored`. Raises
    `CheckpointError` if the file is no LoRA, is damaged, or changes nothing in this model.
    """
    checkpoint = open_checkpoint(source)
    try:
        return _read(checkpoint, shapes, expert)
    except CheckpointError as fault:
        raise fault if fault.where else CheckpointError(str(fault), where=checkpoint.describe()) from None


def _read(checkpoint: Checkpoint, shapes: Shapes, expert: str | None) -> Lora:
    find = Finder(shapes)
    ignored: dict[str, list[str]] = {}
    modules: dict[str, dict[str, str]] = {}  # official module -> role -> name in the file
    others = for_other_expert([*checkpoint.tensors, *(module + SUFFIX for module in checkpoint.attention)], expert)
    unsupported: set[str] = set()  # modules with a tensor that gives the others a different meaning
    spellings: dict[str, None] = {}
    for name in checkpoint.tensors:
        parsed = parse_name(name)
        module = None if parsed is None else find.module(parsed.module)
        if name in others:
            ignored.setdefault(OTHER_EXPERT, []).append(name)
        elif for_text_encoder(name):
            ignored.setdefault(TEXT_ENCODER, []).append(name)
        elif parsed is None:
            ignored.setdefault(UNKNOWN_FORM, []).append(name)
        elif module is None:
            ignored.setdefault(UNKNOWN_MODULE, []).append(name)
        elif parsed.role == "other":
            ignored.setdefault(UNSUPPORTED, []).append(name)
            unsupported.add(module)
        else:
            twin = modules.setdefault(module, {}).setdefault(parsed.role, name)
            if twin != name:
                raise CheckpointError(f"{twin} and {name} both change {module}. Download it again.")
            spelled = parsed.spelled if parsed.role != "alpha" else ""
            spellings.setdefault(f"{find.prefix(parsed.module)} {spelled}".strip())
    attention = _preferences(checkpoint, find, others, ignored)
    settings = PeftSettings(checkpoint.metadata)
    changes: dict[str, tuple[Change, ...]] = {}
    for module, roles in modules.items():
        if module in unsupported:
            ignored[UNSUPPORTED] += roles.values()
            continue
        for parameter, change in ModuleParts(checkpoint, settings, module, roles, shapes, ignored).changes():
            changes[parameter] = (*changes.get(parameter, ()), change)
    if not changes:
        check_lora(checkpoint)
        raise CheckpointError(_nothing(ignored))
    return Lora(
        where=checkpoint.describe(),
        spelling=spelling_words(spellings),
        changes=changes,
        ignored={why: tuple(names) for why, names in ignored.items()},
        metadata=checkpoint.metadata,
        attention=attention,
    )


def _preferences(
    checkpoint: Checkpoint, find: Finder, others: Collection[str], ignored: dict[str, list[str]]
) -> dict[str, bytes]:
    """The preferences by official attention module. others: names for the other expert. ignored: extended here."""
    found: dict[str, bytes] = {}
    for theirs, text in checkpoint.attention.items():
        name, module = theirs + SUFFIX, find.attention_module(theirs)
        if name in others:
            ignored.setdefault(OTHER_EXPERT, []).append(name)
        elif for_text_encoder(name):
            ignored.setdefault(TEXT_ENCODER, []).append(name)
        elif module is None:
            ignored.setdefault(UNKNOWN_MODULE, []).append(name)
        else:
            found[module] = text
    return found


def check_lora(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a file of anything else, by its tensors' names."""
    if not is_lora(checkpoint.tensors):
        words = f"not a LoRA: its tensors are {listing(sorted(checkpoint.tensors), 3)}. Give the file of a LoRA."
        raise CheckpointError(words, where=checkpoint.describe())


def _nothing(ignored: Mapping[str, list[str]]) -> str:
    reasons = "; ".join(f"{len(names)} are {why} ({listing(names, 2)})" for why, names in ignored.items())
    return f"it changes nothing in this model: {reasons or 'it is empty'}. It was made for another model."
