"""What a user may say of a plan: `PlanNumbers`, the same for the command line and the sampler node."""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.config.checks import OptionError
from wan_core.config.table import Checked, option, parse_slashes


@dataclass(frozen=True, kw_only=True)
class MotionOptions(Checked):
    """The first steps of a run with step-distilled LoRAs: guided, and without them. Raises OptionError.

    above: steps with at least this share of noise; above 1 it is a timestep. guidance: of these steps.
    """

    above: float = option(name="motion", low=0.001, high=1000, advice="0.985 for image-to-video, or a timestep as 985")
    guidance: float = option(3.5, name="motion guidance", low=0, high=100, advice="3.5 is usual")

    @property
    def timestep(self) -> float:
        """The last timestep at which a step is one of these."""
        return self.above if self.above > 1 else round(self.above * 1000, 6)

    @classmethod
    def parse(cls, text: str) -> MotionOptions:
        """`ABOVE` or `ABOVE/GUIDANCE`. Raises OptionError."""
        return parse_slashes(cls, text, "motion: share of noise/guidance such as 0.985/3.5")


@dataclass(frozen=True, kw_only=True)
class LoraShares:
    """How much of its strength a LoRA has in each phase of a run; the last one holds for those after it. of: "high",
    "low" or "all", or a part of a file's name. Raises OptionError."""

    of: str
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.of.strip() or not self.shares or not all(-100 <= share <= 100 for share in self.shares):
            shown = ";".join(f"{share:g}" for share in self.shares)
            raise OptionError(f"LoRA strengths {self.of}={shown} given; write NAME=0;1, each from -100 to 100")

    def at(self, phase: int) -> float:
        """The share in a phase, from 0."""
        return self.shares[min(phase, len(self.shares) - 1)]

    @classmethod
    def parse(cls, text: str) -> LoraShares:
        """`NAME=0;1;1`. Raises OptionError."""
        of, _, numbers = text.rpartition("=")
        try:
            return cls(of=of.strip(), shares=tuple(float(one) for one in numbers.split(";")))
        except ValueError:
            raise OptionError(
                f"LoRA strengths {text[:60]!r} given; write NAME=0;1: high, low, all or a part of a file's name, and "
                "for each phase a number from -100 to 100"
            ) from None


@dataclass(frozen=True, kw_only=True)
class ScheduleNumbers:
    """The numbers of a schedule. Those that are None come from the preset, else from the task. Raises OptionError.

    steps: from noise to video. boundary: the high-noise expert runs where timestep >= boundary * 1000. solver: None is
    the preset's, or unipc.
    """

    steps: int | None = option(None, help="", tip="How many steps from noise to video. {own}.", shown=0, least=0)
    shift: float | None = option(
        None,
        help="larger spends more steps on high noise",
        tip="Larger spends more of the steps on high noise. {own}.",
        shown=0.0,
        least=0,
        most=100,
        step=0.1,
    )
    boundary: float | None = option(
        None,
        help="the high-noise expert runs where timestep >= boundary * 1000",
        tip="The high-noise expert runs the steps with at least this share of noise, the low-noise expert the "
        "rest. {own}.",
        shown=0.0,
        least=0,
        most=1,
        step=0.005,
        advanced=True,
    )
    guidance_high: float | None = option(
        None,
        flag="guidance",
        fields=("guidance_high", "guidance_low"),
        shared=True,
        help="how strongly steps follow the prompt, 1 turns guidance off: one number for both experts, or two",
        metavar="HIGH[/LOW]",
        tip="How strongly the high-noise steps follow the prompt (CFG). 1 turns guidance off, which halves the "
        "time. {own}.",
        shown=0.0,
        least=0,
        most=100,
        step=0.1,
    )
    guidance_low: float | None = option(
        None,
        tip="The same for the low-noise steps. {own}.",
        shown=0.0,
        least=0,
        most=100,
        step=0.1,
    )
    solver: str | None = option(
        None,
        help="default: the preset's, else unipc",
        tip="unipc is what Wan is released with; euler is what step-distilled models are trained for. heun runs "
        "two forwards a step; lcm adds new noise at each.",
        shown="unipc",
    )


@dataclass(frozen=True, kw_only=True)
class PlanNumbers(ScheduleNumbers):
    """All that a user may say of the plan of any video: widgets of the sampler node and of the plan preview, in this
    order, and options of every command that plans. Raises OptionError.

    preset: settings for step-distilled weights, see `wan_core.sampling.presets`.
    """

    preset: str = option(
        "auto",
        help="settings for step-distilled weights, for options that are not given; auto: if a file's name or "
        "metadata says that it is distilled; -guided: with guidance for the high-noise expert (default "
        "%(default)s)",
        tip="Settings of step-distilled weights, for numbers left at 0. Few Euler steps, no guidance, half of the "
        "steps for each expert ('-guided': guidance for the high-noise one). 'auto': where the name or metadata of "
        "a LoRA or model says that it is distilled. 'template': as ComfyUI's Wan 2.2 templates, 20 steps, or 4 "
        "with a distilled LoRA. 'motion': the first steps are guided and without the distilled LoRA, for more motion.",
    )
    motion: MotionOptions | None = option(
        None,
        help="steps with at least this share of noise (or this timestep) are guided and have no step-distilled LoRA, "
        "which keeps motion: 0.985/3.5; what preset motion does",
        metavar="ABOVE[/GUIDANCE]",
        tip="Steps with at least this share of noise (or this timestep) are guided and run without the step-distilled "
        "LoRA, which keeps motion: 0.985/3.5, the second number is the guidance. Empty: only with a preset 'motion'.",
        shown="",
        advanced=True,
    )
    lora_strengths: tuple[LoraShares, ...] | None = option(
        None,
        flag="lora-strength",
        help="share of its strength that a LoRA has in each phase of the run (the experts' steps; with motion the "
        "guided steps first): high=0;1;1, low, all, or a part of a file's name; may be repeated",
        metavar="NAME=0;1",
        tip="Share of its strength that a LoRA has in each phase of the run (guided steps, high-noise expert, "
        "low-noise expert): 'high=0;1', 'low', 'all' or a part of a file's name, several with commas.",
        shown="",
        advanced=True,
        parse=LoraShares.parse,
        several=True,
    )
