"""The plan of a generation: timestep, sigma, expert, guidance, branches and action of every step, as plain numbers.

`make_plan` is a pure function and a `Plan` holds no tensors, so a plan can be printed, drawn, tested and timed without
a GPU. The same plan drives the sampler, the progress bar, the time estimate and the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from wan_core.config import EXACT, NagOptions, OptionError, SparseOptions, check_choice
from wan_core.config.checks import check_range
from wan_core.config.table import stated
from wan_core.models.wan.families import TASKS, Task, find_task
from wan_core.models.wan.families.clips import LongVideo
from wan_core.sampling.schedules import (
    Window,
    dpmpp_schedule,
    euler_schedule,
    given_schedule,
    heun_forwards,
    unipc_schedule,
)
from wan_core.sampling.steps import Branch, Expert, Step, as_json, share_words, step_numbers

SCHEDULES: dict[str, Callable[[int, float], tuple[list[float], list[float]]]] = {
    "unipc": unipc_schedule,
    "dpm++": dpmpp_schedule,
    "euler": euler_schedule,
    "heun": euler_schedule,
    "res_multistep": euler_schedule,
    "lcm": euler_schedule,
}
MAX_STEPS = 1000
WARNING = "warning: "  # begins a line that pages show first, with a sign and as a toast
NOT_PRINTED = "name window from_latents long latent_shape tokens guidance_mode image seconds text_rows"
PURE_NOISE = 0.999  # a schedule that is given and begins below begins with latents


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
class Plan:
    """The steps of one run and the settings that determine them."""

    name: str  # of the task, or of a model of ComfyUI that has none here
    solver: str
    shift: float
    boundary: float
    unskipped: int | None = None  # forwards of the same plan without skipping; None: no skipping was asked for
    sparse: SparseOptions | None = None  # how steps with a sparsity select blocks
    speed: str = EXACT  # which attention `auto` stands for follows the word
    notes: tuple[str, ...] = ()  # decisions about skipping, sparsity and presets, for the report
    warnings: tuple[str, ...] = ()  # what is probably a mistake (`wan_core.sampling.mistakes`)
    nag: NagOptions | None = None  # of the steps marked so
    before: tuple[float, ...] = ()  # sigmas of the schedule before the first step of this run
    known: KnownFrames | None = None  # beside the first and the last; None: no others are
    prompts: PromptTimes | None = None  # of parts of the video; None: one holds for all frames
    window: Window | None = None  # the part that is to run, until `cut_plan` has left the other steps out
    from_latents: bool = False  # it begins with latents and part of the noise; otherwise with noise alone
    # What is made, which no step says: `as_dict` leaves it out.
    long: LongVideo | None = None  # its clips; None: they are not known
    latent_shape: tuple[int, ...] = ()  # [B, C, T, Y, X], of the longest clip
    tokens: int = 0  # of a forward; 0: the architecture is not known
    guidance_mode: str = "sequential"  # or "batched", "parallel": how the branches of guidance run
    image: bool = False  # the VAE encodes one
    seconds: float = 0.0  # of sound that is encoded
    text_rows: int = 0  # of the longest text, where it is longer than the model's own
    steps: tuple[Step, ...]

    @property
    def task(self) -> Task | None:
        return TASKS.get(self.name)

    @property
    def batched(self) -> bool:
        return self.guidance_mode == "batched"

    @property
    def count(self) -> int:
        """Solver steps: what a user means by steps."""
        return sum(not step.correction for step in self.steps)

    @property
    def lines(self) -> tuple[str, ...]:
        return (*(WARNING + warning for warning in self.warnings), *self.notes)

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
        return tuple(tuple(steps) for _, steps in groupby(self.steps, lambda step: step.expert))

    @property
    def saved(self) -> float:
        return 0.0 if self.unskipped is None else 1 - self.forwards / self.unskipped

    def guidance_of(self, expert: Expert) -> float:
        """The guidance scale of an expert's guided steps; 1 if it has none."""
        steps = [s for s in self.steps if s.expert == expert]
        return next((s.guidance for s in steps if "uncond" in s.branches), steps[0].guidance)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The sigma before every step, and the one at the end: 0, unless noise is left over."""
        return (*(s.sigma for s in self.steps), self.steps[-1].sigma_next)

    @property
    def forwards(self) -> int:
        """Transformer forwards of batch 1 in the whole run."""
        return sum(s.forwards for s in self.steps)

    @property
    def experts(self) -> tuple[Expert, ...]:
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

    def settings(self) -> dict[str, Any]:
        """What reports and video files say of every plan."""
        return {
            "task": self.name,
            "steps": self.count,
            "shift": self.shift,
            "boundary": self.boundary,
            "guidance": {expert: self.guidance_of(expert) for expert in self.experts},
            "guidance_mode": self.guidance_mode,
            "solver": self.solver,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, as `plan --json` prints them."""
        first: dict[str, Any] = {
            "task": self.name,
            **{name: getattr(self, name) for name in ("solver", "shift", "boundary", "forwards")},
            "unskipped": self.forwards if self.unskipped is None else self.unskipped,
            "saved": round(self.saved, 4),
        }
        values = stated(self, ("sparse", "notes"))
        values |= {name: values[name].at for name in ("known", "prompts") if name in values}  # frames by their numbers
        others = [name for name in values if name not in (*first, *NOT_PRINTED.split())]
        return first | {name: as_json(values[name]) for name in others}

    def table(self) -> str:
        """The steps as text, one per line, with a line at the change of expert."""
        count = {e: sum(s.expert == e and not s.correction for s in self.steps) for e in self.experts}
        lines = [
            f"{self.name}: {self.step_words()}, {self.solver}, shift {self.shift:g}, boundary {self.boundary:g} "
            f"({', '.join(f'{n} {e}-noise' for e, n in count.items())}), {self.forward_words()}",
            *([self.known.words()] if self.known else []),
            *([self.prompts.words()] if self.prompts else []),
            *self.lines,
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
        """`80 forwards`, or `44 of 80 forwards (45 % saved)`."""
        if self.unskipped in (None, self.forwards):
            return f"{self.forwards} forwards"
        return f"{self.forwards} of {self.unskipped} forwards ({100 * self.saved:.0f} % saved)"


def make_plan(
    *,
    task: Task | str = "t2v-A14B",
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
    default = find_task(task) if isinstance(task, str) else task
    own_schedule = None if sigmas is None else given_schedule(sigmas)
    steps = (default.steps if own_schedule is None else len(own_schedule[1])) if steps is None else steps
    shift = default.shift if shift is None else shift
    boundary = default.boundary if boundary is None else boundary
    if guidance_low not in (None, guidance_high) and not boundary and not TASKS[default.name].two_experts:
        raise OptionError(
            f"guidance {guidance_low:g} given for the low-noise steps, but {default.name} has one transformer, and at "
            "boundary 0 all of its steps are high-noise: give guidance_high alone (--guidance with one number), or a "
            "boundary above 0"
        )
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
        name=default.name,
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
    """(sigmas, timesteps) of the whole schedule, `own_schedule` or the solver's, and its window. Raises OptionError."""
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
    check_range("steps", steps, 1, MAX_STEPS)
    if not 1e-6 <= shift <= 1000:  # a smaller one divides by 0
        raise OptionError(f"shift {shift} given; it must be from 0.000001 to 1000 (Wan uses 3 to 12)")
    check_range("boundary", boundary, 0, 1, "a share of the noise, 0.875 for text-to-video")
    for expert, value in guidance.items():
        check_range(f"{expert}-noise guidance", value, 0, 100, "1 turns it off")


def cut_plan(plan: Plan) -> Plan:
    """The part of `plan` that its window asks for, with steps numbered from 0. Forwards that would reuse what a step
    before the window computed are computed, and so is a last step that removes the noise that is left."""
    window = plan.window
    if window is None:
        return plan
    numbers = step_numbers(plan.steps)
    assert window.end is not None
    inside = [step for step, number in zip(plan.steps, numbers, strict=True) if window.start <= number < window.end]
    before = tuple(step.sigma for step in plan.steps[: inside[0].index])
    if window.end <= numbers[-1] and not window.leftover:
        inside = [step for step in inside if not (step.correction and step is inside[-1])]
        inside[-1] = replace(inside[-1], sigma_next=0.0, action="compute", skipped=())
    steps = tuple(replace(step, index=index) for index, step in enumerate(inside))
    from_latents = plan.from_latents or window.start > 0
    return replace(plan, window=None, steps=without_lost_sources(steps), before=before, from_latents=from_latents)


def without_lost_sources(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`steps`, in which forwards run whose residual would come from none of them."""
    mended: list[Step] = []
    computed: dict[Branch, int] = {}
    for step in steps:
        if mended and (mended[-1].expert, mended[-1].kind) != (step.expert, step.kind):
            computed = {}
        skipped: tuple[Branch, ...] = tuple(branch for branch in step.skipped if computed.get(branch))
        if skipped != step.skipped or step.action == "forecast":
            two = step.action == "forecast" and all(computed[branch] > 1 for branch in skipped)
            step = replace(step, skipped=skipped, action=("forecast" if two else "reuse") if skipped else "compute")
        for branch in step.branches:
            if branch not in skipped:
                computed[branch] = computed.get(branch, 0) + 1
        mended.append(step)
    return tuple(mended)
