"""A step of a plan: timestep, sigma, expert, guidance, branches and action, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import groupby
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, TypeAlias

from wan_core.config.table import stated

Expert = Literal["high", "low"]
Branch = Literal["cond", "uncond"]
Action = Literal["compute", "reuse", "forecast"]
LoraShare: TypeAlias = tuple[str, float]
"""Which LoRAs, and how much of their strength: "high", "low", "all" or a part of a file's name, and a factor."""


class Condition(NamedTuple):
    """What a forward of a step is conditioned on, see the fields of `Step`."""

    texts: tuple[int, int]
    control: tuple[float, ...] | None
    undriven: bool


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step from `sigma` to `sigma_next`. `timestep` (0..1000) is the model's input and selects the expert.

    A solver step of Heun is two of these: the second, its `correction`, predicts at the end of the first."""

    index: int
    timestep: float
    sigma: float
    sigma_next: float
    expert: Expert
    guidance: float  # velocity = uncond + guidance * (cond - uncond); 1 runs the conditional branch only
    branches: tuple[Branch, ...]
    action: Action = "compute"  # for the skipped branches: reuse the blocks' last residual, or forecast it from two
    skipped: tuple[Branch, ...] = ()  # branches whose blocks do not run
    sparsity: float = 0.0  # share of the key blocks that attention does not read
    cost: float = 1.0  # estimated time of a forward (the mean of all), relative to one with dense attention
    # What few plans use: `as_dict` has it where it is used.
    texts: tuple[int, int] = (0, 0)  # which text of the prompt and of the negative prompt, where they change in a run
    correction: bool = False  # the second forward of a solver step (Heun): its sigma is its sigma_next
    nag: bool = False  # normalized attention guidance: cross-attention also sees the negative prompt
    undriven: bool = False  # the driving video is not read
    control: tuple[float, ...] | None = None  # how much each control video counts, or all; None: as conditioned
    passes: int = 0  # forwards over a driving video before this step (Animate-2)
    loras: tuple[LoraShare, ...] = ()  # those that have a part of their strength in this step, see `lora_share`
    also: tuple[Condition, ...] = ()  # the velocity is the mean of the step's own condition and of these

    @property
    def kind(self) -> tuple[bool, tuple[Condition, ...], tuple[LoraShare, ...]]:
        """Steps of one kind can use what is kept of each other's forwards."""
        return self.undriven, self.also, self.loras

    @property
    def finishes(self) -> bool:
        """Whether no noise is left after this step: it is the last of the video."""
        return self.sigma_next == 0

    @property
    def computed(self) -> int:
        return len(self.branches) - len(self.skipped)

    @property
    def conditions(self) -> tuple[Step, ...]:
        """The step once for each condition whose velocities are averaged, with that condition alone."""
        return replace(self, also=()), *(replace(self, also=(), **one._asdict()) for one in self.also)

    @property
    def runs(self) -> int:
        """Forwards that one branch takes: one for each condition."""
        return 1 + len(self.also)

    @property
    def forwards(self) -> int:
        """Forwards of batch 1, those over a driving video among them."""
        return self.computed * self.runs + self.passes

    @property
    def unskipped(self) -> int:
        """Forwards of batch 1 where no branch is skipped."""
        return len(self.branches) * self.runs

    def as_dict(self) -> dict[str, Any]:
        always = ("action", "skipped", "sparsity", "cost")
        return {name: as_json(value) for name, value in stated(self, always).items()}

    def words(self) -> str:
        """The step's action as text: `compute`, `reuse`, `reuse uncond`, `forecast`."""
        skipped = f" {'+'.join(self.skipped)}" if self.skipped not in ((), self.branches) else ""
        keys = f", {100 * (1 - self.sparsity):g} % of keys" if self.sparsity and self.forwards else ""
        texts = f", text {self.texts[0] + 1}, negative {self.texts[1] + 1}" if any(self.texts) else ""
        texts += f", mean of {1 + len(self.also)} conditions" if self.also else ""
        marks = ", correction" * self.correction + ", NAG" * self.nag
        control = "" if self.control is None else f", control {' and '.join(f'{one:g}' for one in self.control)}"
        driving = f", {self.passes} over the driving video" if self.passes else ", undriven" * self.undriven
        loras = "".join(f", {of} x {share:g}" for of, share in self.loras)
        return f"{self.action}{skipped}{marks}{keys}{texts}{control}{driving}{loras}"


def averaged(steps: Sequence[Step]) -> Step:
    """The first of `steps`, which averages the velocities of the conditions of all of them: the inverse of
    `Step.conditions`. Equal conditions are one."""
    first, *others = (Condition(step.texts, step.control, step.undriven) for step in steps)
    return replace(steps[0], also=tuple(others) if any(one != first for one in others) else ())


def split_by_kind(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps of one kind that follow each other: what is kept of a forward serves these."""
    return [list(run) for _, run in groupby(steps, lambda step: step.kind)]


def lora_share(loras: Sequence[LoraShare], expert: Expert, file: str) -> float:
    """How much of its strength the LoRA in `file` has in a step of `expert`: what the last entry says that is of it."""
    return next((share for of, share in reversed(loras) if is_of(of, expert, file)), 1.0)


def is_of(of: str, expert: Expert, file: str) -> bool:
    """Whether an entry of strengths is of the LoRA in `file` in a step of `expert`."""
    return of in ("all", expert) or of.lower() in PurePath(file).name.lower()


def deciding(loras: Sequence[LoraShare], expert: Expert, files: Sequence[str]) -> tuple[LoraShare, ...]:
    """The entries that decide the strength of one of the `files` in a step of `expert`: none that later ones override,
    and a share of 1 only where it overrides another."""
    kept: list[tuple[LoraShare, set[str]]] = []
    left = set(files)
    for entry in reversed(loras):
        mine = {file for file in files if is_of(entry[0], expert, file)}
        if mine & left:
            kept.insert(0, (entry, mine))
        left -= mine
    return tuple(
        entry
        for place, (entry, mine) in enumerate(kept)
        if entry[1] != 1 or any(other[1] != 1 and theirs & mine for other, theirs in kept[:place])
    )


def share_words(loras: Sequence[LoraShare]) -> str:
    return ", ".join(f"{of} x {share:g}" for of, share in loras) or "all x 1"


def step_numbers(steps: Sequence[Step]) -> list[int]:
    numbers: list[int] = []
    for step in steps:
        numbers.append((numbers[-1] if numbers else -1) + (not step.correction))
    return numbers


def as_json(value: Any) -> Any:
    if isinstance(value, Step):
        return value.as_dict()
    if isinstance(value, tuple):
        return [as_json(one) for one in value]
    return asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
