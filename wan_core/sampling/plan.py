"""The plan of a generation: timestep, sigma, expert, guidance, branches and action of every step, as plain numbers.

`make_plan` is a pure function and a `Plan` holds no tensors, so a plan can be printed, drawn, tested and timed without
a GPU. The same plan drives the sampler, the progress bar, the time estimate and the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import groupby
from math import isfinite
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, TypeAlias

from wan_core.config import (
    AdaptiveOptions,
    NagOptions,
    OptionError,
    RunNumbers,
    SparseOptions,
    StageOptions,
    WindowOptions,
    check_choice,
)
from wan_core.config.table import said, stated, table
from wan_core.models.wan.families import find_task
from wan_core.sampling.schedules import (
    Window,
    dpmpp_schedule,
    euler_schedule,
    given_schedule,
    heun_forwards,
    unipc_schedule,
)

Expert = Literal["high", "low"]
Branch = Literal["cond", "uncond"]
Action = Literal["compute", "reuse", "forecast", "adaptive"]

SCHEDULES: dict[str, Callable[[int, float], tuple[list[float], list[float]]]] = {
    "unipc": unipc_schedule,
    "dpm++": dpmpp_schedule,
    "euler": euler_schedule,
    "heun": euler_schedule,
    "res_multistep": euler_schedule,
    "lcm": euler_schedule,
}
LoraShare: TypeAlias = tuple[str, float]
"""Which LoRAs, and how much of their strength: "high", "low", "all" or a part of a file's name, and a factor."""
MAX_STEPS = 1000
PURE_NOISE = 0.999  # a schedule that is given and begins below begins with latents


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
    action: Action = "compute"  # for the skipped branches: reuse the blocks' last residual, or forecast it from several
    skipped: tuple[Branch, ...] = ()  # branches whose blocks do not run ("adaptive": may not run, decided in the run)
    order: float = 0  # order of the forecast; 1.5: the mean of the first and the second
    delta: bool = False  # only the conditional branch runs; the last difference of the branches is reused
    sparsity: float = 0.0  # share of the key blocks that attention does not read
    cost: float = 1.0  # estimated time of a forward (the mean of all), relative to one with dense attention
    # What few plans use: `as_dict` has it where it is used.
    texts: tuple[int, int] = (0, 0)  # which text of the prompt and of the negative prompt, where they change in a run
    bound: float = 0.0  # on the relative error of attention, which decides what is read; 0: `sparsity` does
    forecast_bound: float = 0.0  # on the expected error of the forecast, which decides ("adaptive"); 0: another rule
    correction: bool = False  # the second forward of a solver step (Heun): its sigma is its sigma_next
    nag: bool = False  # normalized attention guidance: cross-attention also sees the negative prompt
    own_positions: bool = False  # at a smaller scale: rotary positions are not spaced as the video's
    undriven: bool = False  # the driving video is not read
    scale: float = 1.0  # of the video's width and height at which the model runs
    evaluations: int = 1  # how often ComfyUI's samplers evaluate the model in this step
    control: tuple[float, ...] | None = None  # how much each control video counts, or all; None: as conditioned
    windows: tuple[tuple[int, ...], ...] = ()  # latent frames that each forward of a branch predicts; (): one does all
    passes: int = 0  # forwards over a driving video before this step (Animate-2)
    loras: tuple[LoraShare, ...] = ()  # those that have a part of their strength in this step, see `lora_share`
    window_texts: tuple[tuple[int, int], ...] = ()  # of each window, in place of `texts`

    @property
    def kind(self) -> tuple[float, bool, bool, tuple[LoraShare, ...]]:
        """Steps of one kind can use what is kept of each other's forwards."""
        return self.scale, self.own_positions, self.undriven, self.loras

    @property
    def finishes(self) -> bool:
        """Whether no noise is left after this step: it is the last of the video."""
        return self.sigma_next == 0

    @property
    def computed(self) -> int:
        """Number of branches whose blocks run; for adaptive steps the upper limit."""
        return len(self.branches) - (0 if self.action == "adaptive" else len(self.skipped))

    @property
    def all_texts(self) -> tuple[tuple[int, int], ...]:
        """The texts of the prompt and of the negative prompt that its forwards take."""
        return tuple(dict.fromkeys(self.window_texts)) or (self.texts,)

    @property
    def runs(self) -> int:
        """Forwards that one branch takes: one for each context window, in each evaluation."""
        return max(1, len(self.windows)) * self.evaluations

    @property
    def forwards(self) -> int:
        """Forwards of batch 1, those over a driving video among them; for adaptive steps the upper limit."""
        return self.computed * self.runs + self.passes

    @property
    def unskipped(self) -> int:
        """Forwards of batch 1 where no branch is skipped."""
        return len(self.branches) * self.runs

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        always = ("action", "skipped", "order", "delta", "sparsity", "cost")
        return {name: as_json(value) for name, value in stated(self, always).items()}

    def words(self) -> str:
        """The step's action as text: `compute`, `reuse`, `reuse uncond`, `forecast, last guidance`."""
        skipped = f" {'+'.join(self.skipped)}" if self.skipped not in ((), self.branches) else ""
        keys = f", {100 * (1 - self.sparsity):g} % of keys" if self.sparsity and self.forwards else ""
        if self.bound and self.forwards:
            keys = f", attention's error at most {self.bound:.3g}, about {100 * (1 - self.sparsity):g} % of keys"
        keys += "" if self.scale == 1 else f", {self.scale:g} of the size"
        texts = f", text {self.texts[0] + 1}, negative {self.texts[1] + 1}" if any(self.texts) else ""
        marks = ", last guidance" * self.delta + ", correction" * self.correction + ", NAG" * self.nag
        control = "" if self.control is None else f", control {' and '.join(f'{one:g}' for one in self.control)}"
        windows = f", {len(self.windows)} windows" if self.windows else ""
        windows += f" of texts {', '.join(f'{one + 1}' for one, _ in self.window_texts)}" if self.window_texts else ""
        driving = f", {self.passes} over the driving video" if self.passes else ", undriven" * self.undriven
        often = "" if self.evaluations == 1 else f", {self.evaluations} evaluations"
        loras = "".join(f", {of} x {share:g}" for of, share in self.loras)
        return f"{self.action}{skipped}{marks}{keys}{texts}{control}{windows}{driving}{often}{loras}"


def lora_share(loras: Sequence[LoraShare], expert: Expert, file: str) -> float:
    """How much of its strength the LoRA in `file` has in a step of `expert`: what the last entry says that is of it."""
    fitting = [share for of, share in loras if of in ("all", expert) or of.lower() in PurePath(file).name.lower()]
    return fitting[-1] if fitting else 1.0


def share_words(loras: Sequence[LoraShare]) -> str:
    return ", ".join(f"{of} x {share:g}" for of, share in loras) or "all x 1"


def step_numbers(steps: Sequence[Step]) -> list[int]:
    """The solver step number of each forward."""
    numbers: list[int] = []
    for step in steps:
        numbers.append((numbers[-1] if numbers else -1) + (not step.correction))
    return numbers


def as_json(value: Any) -> Any:
    """Dataclasses as objects and tuples as lists; frames that are known, or begin a prompt, as their numbers."""
    if isinstance(value, (KnownFrames, PromptTimes)):
        return list(value.at)
    if isinstance(value, Step):
        return value.as_dict()
    if isinstance(value, tuple):
        return [as_json(one) for one in value]
    if isinstance(value, SparseOptions) and value.bound is None:  # keys of runs before there were bounds stay
        return {name: one for name, one in asdict(value).items() if name != "bound"}
    return asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]


class KnownFrames(NamedTuple):
    """Which frames of a video of so many are known pictures, from 0. handed: frames of later clips that are given as
    latents of the clip before."""

    at: tuple[int, ...]
    frames: int
    handed: tuple[int, ...] = ()

    def words(self) -> str:
        if self.handed:
            after = f"the latents before are its frames {self.handed[0]} to {self.handed[-1]}"
            return f"each clip of {self.frames} frames: the anchor is frame 0; after the first, {after}"
        return f"known frames: {', '.join(map(str, self.at))} of {self.frames}"


class PromptTimes(NamedTuple):
    """At which frames of a video of so many prompts begin, from 0; each holds up to the next."""

    at: tuple[int, ...]
    frames: int

    def words(self) -> str:
        return f"prompts from frames {', '.join(map(str, self.at))} of {self.frames}"


@dataclass(frozen=True, kw_only=True)
class Plan(RunNumbers):
    """The steps of one run and the settings that determine them."""

    task: str
    solver: str
    shift: float
    boundary: float
    unskipped: int | None = None  # forwards of the same plan without skipping; None: no skipping was asked for
    adaptive: AdaptiveOptions | None = None  # the rule for steps marked "adaptive"
    sparse: SparseOptions | None = None  # how steps with a sparsity select blocks
    keeps: tuple[tuple[Expert, tuple[float, ...]], ...] = ()  # per expert: share of the blocks that each layer reads
    notes: tuple[str, ...] = ()  # decisions about skipping, sparsity and presets, for the report
    nag: NagOptions | None = None  # of the steps marked so
    before: tuple[float, ...] = ()  # sigmas of the schedule before the first step of this run
    context_windows: WindowOptions | None = None  # of steps that have windows
    known: KnownFrames | None = None  # beside the first and the last; None: no others are
    prompts: PromptTimes | None = None  # of parts of the video; None: one holds for all frames
    stages: tuple[StageOptions, ...] = ()  # what gave steps their scale
    window: Window | None = None  # the part that is to run, until `cut_plan` has left the other steps out
    from_latents: bool = False  # it begins with latents and part of the noise; otherwise with noise alone
    steps: tuple[Step, ...]

    @property
    def asked(self) -> dict[str, Any]:
        """What the run reads as the user said it, where that is not the default."""
        return {name: value for name, value in said(self, ()).items() if name in table(RunNumbers)}

    @property
    def count(self) -> int:
        """Solver steps: what a user means by steps."""
        return sum(not step.correction for step in self.steps)

    @property
    def bound(self) -> float | None:
        """On the error of attention, if the run keeps one."""
        return None if self.sparse is None else self.sparse.bound

    @property
    def reads_negative(self) -> bool:
        """Whether any step needs the negative prompt."""
        return self.guided or any(step.nag for step in self.steps)

    def number(self, step: Step) -> int:
        """The number of the solver step that `step` belongs to, from 1."""
        return step_numbers(self.steps)[step.index] + 1

    @property
    def phases(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each expert, in order; those in which LoRAs have other strengths are phases of their own."""
        return tuple(tuple(steps) for _, steps in groupby(self.steps, lambda step: (step.expert, step.loras)))

    @property
    def steps_of_experts(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each expert, in order."""
        return tuple(tuple(steps) for _, steps in groupby(self.steps, lambda step: step.expert))

    @property
    def saved(self) -> float:
        """The share of forwards that do not run."""
        return 0.0 if self.unskipped is None else 1 - self.forwards / self.unskipped

    def guidance_of(self, expert: Expert) -> float:
        """The guidance scale of an expert's guided steps; 1 if it has none."""
        steps = [s for s in self.steps if s.expert == expert]
        return next((s.guidance for s in steps if s.delta or "uncond" in s.branches), steps[0].guidance)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The sigma before every step, and the one at the end: 0, unless noise is left over."""
        return (*(s.sigma for s in self.steps), self.steps[-1].sigma_next)

    @property
    def forwards(self) -> int:
        """Transformer forwards of batch 1 in the whole run."""
        return sum(s.forwards for s in self.steps)

    def window_sizes(self, frames: int) -> tuple[int, ...]:
        """Latent frames that each forward of a branch sees in the step that has most of them, of a video of so many:
        all of them, where there are no context windows."""
        options = self.context_windows
        if options is None:
            return (frames,)
        return max((tuple(len(options.seen(w)) for w in step.windows) for step in self.steps), key=sum)

    @property
    def experts(self) -> tuple[Expert, ...]:
        """The experts that run, in order."""
        return tuple(dict.fromkeys(s.expert for s in self.steps))

    @property
    def guided(self) -> bool:
        """Whether any step runs both branches."""
        return any("uncond" in s.branches for s in self.steps)

    def estimate(self, seconds: Mapping[Expert, float]) -> float | None:
        """Estimated seconds of the whole run; None if `seconds` lacks an expert of the plan.

        seconds: of one forward of each expert with dense attention.
        """
        if not set(self.experts) <= seconds.keys():
            return None
        return sum(s.forwards * s.cost * seconds[s.expert] for s in self.steps)

    def left(self, step: Step, seconds: float) -> float:
        """Seconds that the rest of the run takes after `step`, at so many for one forward that reads everything."""
        return seconds * sum(after.forwards * after.cost for after in self.steps[step.index + 1 :])

    def settings(self, batched: bool) -> dict[str, Any]:
        """What reports and video files say of every plan. batched: how the branches of guidance run."""
        return {
            "shift": self.shift,
            "boundary": self.boundary,
            "guidance": {expert: self.guidance_of(expert) for expert in self.experts},
            "guidance_mode": "batched" if batched else "sequential",
            "solver": self.solver,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, as `plan --json` prints them."""
        first: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("task", "solver", "shift", "boundary", "forwards")},
            "unskipped": self.forwards if self.unskipped is None else self.unskipped,
            "saved": round(self.saved, 4),
        }
        values = stated(self, ("adaptive", "sparse", "keeps", "notes"))
        others = [name for name in values if name not in (*first, "window", "from_latents")]
        keeps = {expert: list(keeps) for expert, keeps in self.keeps}
        return first | {name: as_json(values[name]) for name in others} | {"keeps": keeps}

    def table(self) -> str:
        """The steps as text, one per line, with a line at the change of expert."""
        count = {e: sum(s.expert == e and not s.correction for s in self.steps) for e in self.experts}
        lines = [
            f"{self.task}: {self.step_words()}, {self.solver}, shift {self.shift:g}, boundary {self.boundary:g} "
            f"({', '.join(f'{n} {e}-noise' for e, n in count.items())}), {self.forward_words()}",
            *([self.known.words()] if self.known else []),
            *([self.prompts.words()] if self.prompts else []),
            *(f"{name.replace('_', ' ')}: {value}" for name, value in self.asked.items()),
            *self.notes,
            f"{'step':>4}  {'timestep':>8}  {'sigma':>7}  {'expert':<6}  {'guidance':>8}  {'branches':<11}  action",
        ]
        for step, before in zip(self.steps, (None, *self.steps), strict=False):
            if before is not None and before.expert != step.expert:
                lines.append(f"      ---- boundary {self.boundary * 1000:g}: {before.expert} -> {step.expert} ----")
            elif before is not None and before.loras != step.loras:
                lines.append(f"      ---- LoRAs: {share_words(before.loras)} -> {share_words(step.loras)} ----")
            lines.append(
                f"{step.index:>4}  {step.timestep:>8.6g}  {step.sigma:>7.4f}  {step.expert:<6}  {step.guidance:>8g}  "
                f"{'+'.join(step.branches):<11}  {step.words()}"
            )
        return "\n".join(lines)

    def step_words(self) -> str:
        """`20 steps`, or `10 steps from sigma 0.75 to 0.25` for a part of a schedule."""
        first, last = self.steps[0].sigma, self.steps[-1].sigma_next
        part = f" from sigma {first:.4g} to {last:.4g}" if self.from_latents or last else ""
        return f"{self.count} steps{part}"

    def forward_words(self) -> str:
        """`80 forwards`, or `44 of 80 forwards (45 % saved)`; `at most` if the plan has adaptive steps."""
        most = "at most " if any(s.action == "adaptive" for s in self.steps) else ""
        if self.unskipped in (None, self.forwards):
            return f"{most}{self.forwards} forwards"
        return f"{most}{self.forwards} of {self.unskipped} forwards ({100 * self.saved:.0f} % saved)"


def make_plan(
    *,
    task: str = "t2v-A14B",
    steps: int | None = None,
    shift: float | None = None,
    boundary: float | None = None,
    guidance_high: float | None = None,
    guidance_low: float | None = None,
    solver: str = "unipc",
    sigmas: Sequence[float] | None = None,
    window: Window | None = None,
) -> Plan:
    """The plan of one generation. Arguments that are None take the task's default.

    steps 1..1000; shift > 0; boundary 0..1 (the high-noise expert runs where timestep >= boundary * 1000; at 0 it runs
    every step, as in tasks with one transformer); guidance 0..100 per expert; solver: a name in `SCHEDULES`.
    sigmas: the schedule itself, falling, instead of that of the solver. window: the part of the schedule that is to
    run: the plan has all steps until `cut_plan`. Raises OptionError.
    """
    default = find_task(task)
    if guidance_low is not None and guidance_high is None and not default.two_experts:
        raise OptionError(
            f"guidance {guidance_low} given for the low-noise expert, but {default.name} has one transformer, which "
            "uses guidance_high: give that, or both"
        )
    own_schedule = None if sigmas is None else given_schedule(sigmas)
    steps = (default.steps if own_schedule is None else len(own_schedule[1])) if steps is None else steps
    shift = default.shift if shift is None else shift
    boundary = default.boundary if boundary is None else boundary
    guidance: dict[Expert, float] = {
        "high": default.guidance_high if guidance_high is None else guidance_high,
        "low": default.guidance_low if guidance_low is None else guidance_low,
    }
    _check(steps, shift, boundary, guidance, solver)
    all_sigmas, timesteps, within = _schedule(solver, steps, shift, own_schedule, window)
    rows = [(timesteps[i], all_sigmas[i], all_sigmas[i + 1], False) for i in range(len(timesteps))]
    if solver == "heun":
        rows = heun_forwards(rows)

    def step(index: int, row: tuple[float, float, float, bool]) -> Step:
        timestep, sigma, sigma_next, correction = row
        expert: Expert = "high" if timestep >= boundary * 1000 else "low"
        return Step(
            index=index,
            timestep=timestep,
            sigma=sigma,
            sigma_next=sigma_next,
            expert=expert,
            guidance=guidance[expert],
            branches=("cond",) if guidance[expert] == 1 else ("cond", "uncond"),
            correction=correction,
        )

    return Plan(
        task=default.name,
        solver=solver,
        shift=shift,
        boundary=boundary,
        steps=tuple(step(index, row) for index, row in enumerate(rows)),
        window=within,
        from_latents=sigmas is not None and sigmas[0] < PURE_NOISE,
    )


def _schedule(
    solver: str, steps: int, shift: float, own_schedule: tuple[list[float], list[float]] | None, window: Window | None
) -> tuple[list[float], list[float], Window | None]:
    """(sigmas, timesteps) of the whole schedule, `own_schedule` or the solver's, and the window in it. Raises
    OptionError."""
    whole, within = (steps, None) if window is None else window.within(steps)
    if own_schedule is None:
        if whole > MAX_STEPS:
            raise OptionError(
                f"{steps} steps given, the last of {whole} by their strength, and {MAX_STEPS} are allowed: use fewer "
                "steps or a larger denoise"
            )
        return *SCHEDULES[solver](whole, shift), within
    if steps != len(own_schedule[1]):
        raise OptionError(f"{steps} steps given, and sigmas for {len(own_schedule[1])}: leave the steps out")
    if window is not None and window.denoise != 1:
        raise OptionError("denoise below 1 given, and sigmas, which say where the run begins: leave denoise at 1")
    return *own_schedule, within


def _check(steps: int, shift: float, boundary: float, guidance: dict[Expert, float], solver: str) -> None:
    check_choice("solver", solver, tuple(SCHEDULES))
    if not 1 <= steps <= MAX_STEPS:
        raise OptionError(f"steps {steps} given; allowed are 1 to {MAX_STEPS}")
    if not (isfinite(shift) and 0 < shift <= 1000):
        raise OptionError(f"shift {shift} given; it must be above 0 and at most 1000 (Wan uses 3 to 12)")
    if not 0 <= boundary <= 1:
        raise OptionError(f"boundary {boundary} given; it is a share of the noise from 0 to 1, 0.875 for text-to-video")
    for expert, value in guidance.items():
        if not (isfinite(value) and 0 <= value <= 100):
            raise OptionError(
                f"guidance {value} given for the {expert}-noise expert; allowed are 0 to 100, 1 turns it off"
            )
