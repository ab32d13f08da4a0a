"""Phases of a run: steps of one expert with one strength of every LoRA.

Step-distilled LoRAs take motion away. So a run may begin with steps that are guided and have none of them, and goes on
with them: three phases with two experts, what otherwise takes a chain of three samplers. `with_phases` marks the steps;
the denoising loop has the strengths changed between phases. Imports no torch.

Source of the numbers: Wan2GP's accelerator profiles of Wan 2.2, "Lightning, 3 phases" (switch thresholds 985 and 800 at
shift 5 for image-to-video, 965 and 800 at shift 3 for text-to-video; guidance 3.5, 1, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from wan_core.config import LoraShares, MotionOptions, OptionError
from wan_core.models.wan.families.task import Task
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Expert, Step, deciding, lora_share, share_words

ALL = ("all", "high", "low")  # names of LoRAs that are no part of a file's
DISTILLED = "step-distilled LoRAs"


@dataclass(frozen=True, kw_only=True)
class MotionNumbers:
    """What `motion` stands for. above, boundary: shares of the noise down to which each phase but the last goes."""

    shift: float
    above: float
    boundary: float = 0.8


def motion_numbers(task: Task) -> MotionNumbers:
    if task.image == "none":
        return MotionNumbers(shift=3.0, above=0.965)
    return MotionNumbers(shift=5.0, above=0.985)


def with_phases(
    plan: Plan,
    motion: MotionOptions | None,
    asked: Sequence[LoraShares],
    files: Sequence[Path],
    distilled: Sequence[Path],
    known: bool,
) -> Plan:
    """`plan` with its guided steps without step-distilled LoRAs (`motion`), and with the strengths that are `asked` for
    each phase. files: the LoRAs, `distilled` those that are step-distilled. known: the files of the run are.

    Raises OptionError for phases that have no step, strengths of more phases than there are, and of no LoRA.
    """
    if motion is None and not asked:
        return plan
    first = tuple(motion is not None and step.timestep >= motion.timestep for step in plan.steps)
    keys: list[tuple[Expert, bool]] = [(step.expert, guided) for step, guided in zip(plan.steps, first, strict=True)]
    phases = [key for key, _ in groupby(keys)]
    if motion is not None:
        check_phases(plan, motion, phases)
    check_shares(asked, len(phases), files, known)
    shares = [*(default_shares(distilled, known) if motion is not None else ()), *asked]
    # where files are not known, each name that is given stands for one, and "" for all others
    names = [path.name for path in files] if known else ["", *(one.of for one in shares)]
    steps, number = list[Step](), -1
    for place, (step, key) in enumerate(zip(plan.steps, keys, strict=True)):
        number += place == 0 or key != keys[place - 1]
        mine = [one for one in shares if one.of not in ("high", "low") or one.of == step.expert]
        loras = deciding([(one.of, one.at(number)) for one in mine], step.expert, names)
        changed = replace(step, loras=loras)
        if key[1]:
            assert motion is not None
            branches = ("cond",) if motion.guidance == 1 else ("cond", "uncond")
            changed = replace(changed, guidance=motion.guidance, branches=branches)
        steps.append(changed)
    made = replace(plan, steps=tuple(steps))
    notes = [f"phases: {phase_words(made)}"]
    if motion is not None and not switches(steps[0], steps[first.index(False)], names):
        notes += check_switch(distilled)
    return replace(made, notes=(*made.notes, *notes))


def default_shares(distilled: Sequence[Path], known: bool) -> list[LoraShares]:
    """None of the step-distilled LoRAs in the first phase."""
    names = [path.name for path in distilled] if known else [DISTILLED]
    return [LoraShares(of=name, shares=(0.0, 1.0)) for name in dict.fromkeys(names)]


def switches(first: Step, after: Step, files: Sequence[str]) -> bool:
    """Whether one of the LoRAs in `files` has another strength `after` the guided steps than in the `first` of them."""
    return any(
        lora_share(first.loras, first.expert, file) != lora_share(after.loras, after.expert, file) for file in files
    )


def check_switch(distilled: Sequence[Path]) -> list[str]:
    """A note where the strengths that are asked for leave `motion` nothing to change. Raises OptionError where there is
    no step-distilled LoRA."""
    if not distilled:
        raise OptionError(
            "motion runs its first steps without the step-distilled LoRA, and no LoRA given is one by its name or "
            "metadata: add one, or say which by --lora-strength NAME=0;1 (lora_strengths)"
        )
    return ["motion: every LoRA has the same strength in the guided steps as after them, as lora_strengths says"]


def check_phases(plan: Plan, motion: MotionOptions, phases: Sequence[tuple[Expert, bool]]) -> None:
    """Raise OptionError unless each phase has a step: guided, of the high-noise expert, of the low-noise one."""
    wanted = [("high", True), ("high", False), *([("low", False)] if plan.boundary > 0 else [])]
    if list(phases) != wanted:
        words = {("high", True): "guided", ("high", False): "high-noise", ("low", False): "low-noise"}
        missing = [name for key, name in words.items() if key in wanted and key not in phases]
        why = f"none is a {' or a '.join(missing)} one" if missing else "the first phase reaches the low-noise expert"
        timesteps = ", ".join(f"{step.timestep:.4g}" for step in plan.steps[:8])
        raise OptionError(
            f"{len(wanted)} phases given (down to timestep {motion.timestep:g}, {plan.boundary * 1000:g} and 0) for "
            f"{plan.count} steps at the timesteps {timesteps}, of which {why}: use more steps, or other thresholds"
        )


def check_shares(shares: Sequence[LoraShares], phases: int, files: Sequence[Path], known: bool) -> None:
    """Raise OptionError for strengths of more phases than there are, and of no LoRA."""
    if known and shares and not files:
        raise OptionError(
            f"strengths given for LoRA {shares[0].of}, and the run has no LoRA: add one (--lora), or leave them out"
        )
    for one in shares:
        if len(one.shares) > phases:
            raise OptionError(
                f"{len(one.shares)} strengths given for LoRA {one.of}, and the run has {phases} phases, each of one "
                "expert: give one for each, the last holds for those after it"
            )
        if known and one.of not in ALL and not any(one.of.lower() in path.name.lower() for path in files):
            names = ", ".join(path.name for path in files) or "none"
            raise OptionError(f"strengths given for LoRA {one.of}; there are high, low, all, and of the files {names}")


def phase_words(plan: Plan) -> str:
    """`1 high-noise step guided 3.5 (a.safetensors x 0), 4 high-noise steps, 3 low-noise steps`."""
    words = []
    for phase in plan.phases:
        count = sum(not step.correction for step in phase)
        guided = "" if "uncond" not in phase[0].branches else f" guided {phase[0].guidance:g}"
        loras = f" ({share_words(phase[0].loras)})" if phase[0].loras else ""
        words.append(f"{count} {phase[0].expert}-noise step{'s' * (count != 1)}{guided}{loras}")
    return ", ".join(words)
