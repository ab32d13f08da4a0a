"""A memory plan: what is where, and what each phase of a run takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from wan_core.execution.memory.residency import Policy
from wan_core.execution.report import GIB
from wan_core.models.wan.config import PreparedForm

CONTEXT = int(0.6 * GIB)  # what CUDA and its libraries take of a card beside torch's own memory
RESERVE = 0.5 * GIB, 0.025  # for holes between pieces of memory: so much, and this share of the room


@dataclass(frozen=True)
class Phase:
    name: str
    weights: int
    beside: int
    what: str

    @property
    def total(self) -> int:
        return self.weights + self.beside


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What is where, and what each phase takes on the device. `room`: for weights and what runs beside them. `form`:
    how what is prepared beside text is kept; None: there is one way. `copied`: bytes a forward copies to the device.
    """

    policy: Policy
    resident_blocks: int
    blocks: int
    room: int
    reserve: int
    host: int  # locked host memory, `form` included
    together: bool  # models stay beside each other where there is room
    streams_text: bool  # the blocks of the text encoder stream
    phases: tuple[Phase, ...]
    beside: Mapping[str, int]  # by model: what `Residency` keeps free for it
    why: str
    form: PreparedForm | None = None
    copied: int = 0

    @property
    def exact(self) -> bool:
        """Whether what is prepared is kept as it was computed."""
        return self.form is None or self.form.exact

    @property
    def staying_blocks(self) -> int | None:
        """How many blocks stay on the device where others stream; None where none do."""
        return self.resident_blocks if self.policy == "stream" else None

    @property
    def denoise(self) -> int:
        """Bytes on the device while the steps run."""
        return next(phase.total for phase in self.phases if phase.name == "denoise")

    @property
    def peak(self) -> int:
        return max(phase.total for phase in self.phases)

    @property
    def fits(self) -> bool:
        return self.peak <= self.room

    @property
    def denoises(self) -> bool:
        """Whether the steps fit, half of the reserve counted in."""
        return self.denoise <= self.room + self.reserve // 2

    @property
    def card_gib(self) -> float:
        """The memory of a card that this plan fits on."""
        return ((self.peak + RESERVE[0]) / (1 - RESERVE[1]) + CONTEXT) / GIB

    def table(self) -> str:
        kind = {
            "resident": "everything stays on the device",
            "swap": "weights are in host memory, and each model is copied as a whole",
            "stream": f"{self.resident_blocks} of {self.blocks} blocks stay on the device, the others stream",
        }[self.policy]
        lines = [f"memory plan: {self.policy}, {kind} ({self.why})"]
        lines.append(f"  {'phase':<14}{'weights':>9}{'activations':>13}{'total':>9}   GiB")
        for phase in self.phases:
            weights, activations, total = (n / GIB for n in (phase.weights, phase.beside, phase.total))
            lines.append(f"  {phase.name:<14}{weights:>9.2f}{activations:>13.2f}{total:>9.2f}   {phase.what}")
        over = "" if self.fits else f"  DOES NOT FIT: it takes a card of {math.ceil(self.card_gib)} GiB"
        lines.append(
            f"  {'peak':<14}{self.peak / GIB:>31.2f}   of {self.room / GIB:.2f} usable, and "
            f"{self.reserve / GIB:.2f} in reserve{over}"
        )
        prepared = f"; {self.form.host / GIB:.2f} of them for {self.form.words}" if self.form and self.form.host else ""
        lines.append(f"  {'host memory':<14}{self.host / GIB:>31.2f}   pinned, for weights{prepared}")
        if self.form is not None and self.copied:
            lines.append(f"  {'each forward':<14}{self.copied / GIB:>31.2f}   copied to the device from host memory")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        phases = {p.name: round(p.total / GIB, 3) for p in self.phases}
        return {
            "policy": self.policy,
            "resident_blocks": self.resident_blocks,
            "streams_text": self.streams_text,
            "peak_gib": round(self.peak / GIB, 3),
            "room_gib": round(self.room / GIB, 3),
            "host_gib": round(self.host / GIB, 3),
            "phases_gib": phases,
        } | ({} if self.form is None else {"prepared": self.form.words, "copied_gib": round(self.copied / GIB, 3)})
