"""Which weights move to pinned host memory, decided before any are read.

Weights that do not stay on the GPU wait in pinned host memory, from where they reach it at full speed. Where there is
not enough of it, weights that are used as they are stored stay in their mapped files: the system reads and drops their
pages as it has room, and copies are slower. Blocks of a packed file that are kept are decoded, into host memory. The
text encoder goes first, which a prompt needs once, then the low-noise expert, which the last steps need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from wan_core.config import OptionError
from wan_core.config.host_memory import available_bytes
from wan_core.execution.memory.residency import KEPT_FREE
from wan_core.execution.report import GIB
from wan_core.models.wan.config import DiTConfig, PreparedForm
from wan_core.pipeline.loras import Wanted, check_packed
from wan_core.pipeline.model_parts import is_packed
from wan_core.pipeline.settings import PartToLoad

STAY_IN_FILES = ("text_encoder", "low", "high")  # in this order
LORA_WHY = "the weights stay in the mapped file"


class HostPlan(NamedTuple):
    """`mapped`: names of the models whose weights stay in their files. `pins`: there is room to pin the others; None:
    that is decided one by one."""

    mapped: frozenset[str] = frozenset()
    pins: bool | None = None

    def copies(self, name: str) -> bool | None:
        """For `Residency.add`."""
        return False if name in self.mapped else self.pins


def plan_host(parts: Mapping[str, PartToLoad], available: int | None, prepared: PreparedForm | None = None) -> HostPlan:
    """Where the weights of `parts` wait. available: bytes of host memory; None: not known. prepared: what a run keeps
    there beside them.

    Raises OptionError where they do not fit: what they need, and what to do."""
    if available is None:
        return HostPlan()
    mapped: set[str] = set()
    kept = 0 if prepared is None else prepared.host
    needed, room = sum(part.bytes for part in parts.values()), int(available * (1 - KEPT_FREE))
    for name in STAY_IN_FILES:
        if (needed > room or needed + kept > available) and name in parts and parts[name].stays_in_file:
            mapped.add(name)
            needed -= parts[name].bytes - parts[name].decoded_bytes
    if needed + kept > available:
        sizes = ", ".join(
            f"{name} {size / GIB:.1f}"
            for name, part in parts.items()
            if (size := part.decoded_bytes if name in mapped else part.bytes)
        )
        if prepared is not None and kept:
            raise _no_room(prepared, needed, available)
        raise OptionError(
            f"these models wait in host memory, which takes {needed / GIB:.1f} GiB ({sizes}), and "
            f"{available / GIB:.1f} GiB are available: end other programs, or use files whose weights can stay there: "
            "scaled FP8 or GGUF with precision 'checkpoint', INT8 (ConvRot) with 'int8'"
        )
    return HostPlan(frozenset(mapped), True if needed <= room else None)


def check_prepared(
    form: PreparedForm | None, before: PreparedForm | None, waiting: int, limit_gib: float | None = None
) -> None:
    """Raise OptionError where host memory has no room for what a run keeps there, beside `waiting` bytes of weights.
    before: what the run before kept, whose memory may be used again."""
    available = host_room(limit_gib, waiting)
    if form is None or form.uses_again(before) or available is None:
        return
    if form.host and waiting + form.host > available:
        raise _no_room(form, waiting, available)


def _no_room(form: PreparedForm, weights: int, available: int) -> OptionError:
    return OptionError(
        f"{form.words}, take {form.host / GIB:.1f} GiB beside {weights / GIB:.1f} GiB of weights, and "
        f"{available / GIB:.1f} GiB of host memory are available: make a smaller video or shorter clips, end other "
        "programs, or use a GPU with more memory"
    )


def check_host(parts: Mapping[str, PartToLoad], available: int | None) -> None:
    """Raise OptionError where a CPU's models do not fit into host memory. Weights that are used as they are stored stay
    in their mapped files and do not count; blocks that are decoded do. available: bytes of host memory; None: not
    known."""
    sizes = {name: part.decoded_bytes if part.stays_in_file else part.bytes for name, part in parts.items()}
    sizes = {name: size for name, size in sizes.items() if size}
    if available is None or sum(sizes.values()) <= available:
        return
    words = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sizes.items())
    raise OptionError(
        f"on a CPU these models take {sum(sizes.values()) / GIB:.1f} GiB of host memory ({words}), and "
        f"{available / GIB:.1f} GiB are available: end other programs, or use a smaller model or a GPU"
    )


def host_room(limit_gib: float | None = None, waiting: int = 0) -> int | None:
    """Bytes of host memory for weights, at most the limit; None: not known. waiting: of weights that are there
    already."""
    available = available_bytes()
    available = None if available is None else available + waiting
    if limit_gib is None:
        return available
    return int(limit_gib * GIB) if available is None else min(available, int(limit_gib * GIB))


def staying_in_file(part: PartToLoad, loras: Sequence[Wanted] = ()) -> PartToLoad:
    """`part` for weights that are a mapped file's: LoRAs are attached, because merging would copy them. Raises
    OptionError for one of `loras` that has to be merged."""
    check_attached(part, loras)
    return replace(part, lora_mode="attach", lora_why=LORA_WHY)


def check_attached(part: PartToLoad, loras: Sequence[Wanted]) -> None:
    """Raise OptionError for one of `loras` that has to be merged, where `part` stays packed in a mapped file."""
    config = part.part.config
    if is_packed(part.quantization) and isinstance(config, DiTConfig):
        check_packed(loras, config, "host memory is short, and they stay in the mapped file: end other programs")
