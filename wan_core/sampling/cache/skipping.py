"""Applies SkipOptions to a plan: sparse attention, then the step cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wan_core.config import EXACT, OptionError, SkipOptions
from wan_core.config.file_names import file_says
from wan_core.config.printing import command
from wan_core.config.table import slashes
from wan_core.models.wan.families import check_sparse
from wan_core.sampling.cache.curves import Curve, find_curve
from wan_core.sampling.cache.magcache import skip_magcache
from wan_core.sampling.cache.policies import skip_taylorseer
from wan_core.sampling.cache.speed import MIN_STEPS, PRECISION, at_speed
from wan_core.sampling.control import with_passes
from wan_core.sampling.plan import Plan, cut_plan
from wan_core.sampling.sparsity.schedule import sparsify

# Solvers whose forwards do not follow one another as a cache expects, and why.
UNCACHED = {
    "heun": "which runs two forwards at almost one sigma",
    "lcm": "whose steps begin with new noise each",
}
HIGH_GUIDANCE = 6.0  # ComfyUI's templates of Wan have 3.5 to 6; at 7 step caches failed (docs/quality.md)


def skip_forwards(
    plan: Plan,
    options: SkipOptions | None,
    checkpoint: Path | None,
    low: Path | None = None,
    *,
    image: bool = False,
    loras: Sequence[Path] = (),
) -> Plan:
    """The part of `plan` that is to run, with `apply_policies` for the whole, and with forwards over a driving video.
    Raises OptionError, also for what the models of the task cannot do."""
    if options is None:
        return with_passes(cut_plan(plan))
    everything = with_passes(cut_plan(plan)).forwards
    plan = apply_policies(plan, options, checkpoint, low, image=image, loras=loras)
    part = with_passes(cut_plan(plan))
    if part.before and plan.sparse is not None:
        said = f"steps in these notes are those of the whole schedule: this run begins at its step {len(part.before)}"
        part = replace(part, notes=(*part.notes, said))
    return replace(part, unskipped=everything)


def apply_policies(
    plan: Plan,
    options: SkipOptions,
    checkpoint: Path | None,
    low: Path | None = None,
    *,
    image: bool = False,
    loras: Sequence[Path] = (),
    of_sampler: bool = False,
) -> Plan:
    """`plan` with sparse attention and `leave_out`, with the MagCache curve that is beside the
    checkpoint or published for the task. File names tell whether the weights are step-distilled.

    checkpoint: of the high-noise expert or only transformer; low: of the low-noise expert. image: the video starts
    from an image (TI2V). loras: LoRA files of both experts. of_sampler: a sampler of ComfyUI walks a part of `plan`,
    with a model of any variant. Raises OptionError.
    """
    word, (options, distilled) = options.speed, for_run(options, plan.count, (checkpoint, low, *loras))
    if word != EXACT:
        few = options == SkipOptions() and not distilled
        why = f", as a forecast is too far off in {plan.count} steps" if few else ""
        plan = replace(plan, speed=word, notes=(*plan.notes, f"speed {word}: {skip_words(options)}{why}; {PRECISION}"))
    if word != EXACT and options.taylorseer is not None and plan.solver.removeprefix("ComfyUI ") in UNCACHED:
        plan = replace(plan, notes=(*plan.notes, f"no step is forecast: the solver is {plan.solver}"))
        options = replace(options, taylorseer=None)
    if plan.task and not of_sampler and options.sparse is not None and options.sparse.sparsity:
        try:
            check_sparse(plan.task)
        except OptionError as fault:
            raise (
                fault if word == EXACT else OptionError(f"speed {word}: {fault}; careful and exact read all")
            ) from None
    plan = sparsify(plan, options.sparse)
    if plan.solver == "ComfyUI lcm" and replace(options, sparse=None) != SkipOptions():
        check_cacheable("lcm", "the step cache")
    curve = find_curve(checkpoint, plan.name, image=image) if options.magcache and plan.task else None
    return leave_out(plan, options, curve, distilled=distilled)


def for_run(options: SkipOptions, steps: int, files: Sequence[Path | None]) -> tuple[SkipOptions, str]:
    """`options` with what their word does in a run of so many steps, and what says that one of the files is
    step-distilled, or ""."""
    said = [file_says(path) for path in files if path is not None]
    distilled = next((one.why for one in said if one.steps is not None), "")
    return at_speed(options, steps, bool(distilled)), distilled


def check_cacheable(solver: str, name: str) -> None:
    """Raise OptionError where a solver's forwards do not follow one another as `name` expects."""
    if solver in UNCACHED:
        raise OptionError(f"{name} does not fit the solver {solver}, {UNCACHED[solver]}: leave one of them out")


def check_curve(curve: Curve | None, task: str) -> Curve:
    """The curve that MagCache needs. Raises OptionError where there is none."""
    if curve is None:
        raise OptionError(
            f"MagCache needs a curve, and there is none for {task}: run `{command('calibrate')}`, or use taylorseer or "
            "a word of speed, which need none"
        )
    return curve


def leave_out(plan: Plan, options: SkipOptions, curve: Curve | None, *, distilled: str = "") -> Plan:
    """`plan` with the step cache of `options`; its notes say what was decided.

    curve: for MagCache. distilled: what says that a file is step-distilled, or "". Step caches are switched off for
    step-distilled weights and below 10 steps, because consecutive steps differ too much. Raises OptionError if MagCache
    has no curve.
    """
    full, steps = plan.forwards, len(plan.steps)
    if not (options.magcache or options.taylorseer):
        return replace(plan, unskipped=full)
    name = "MagCache" if options.magcache else "TaylorSeer"
    check_cacheable(plan.solver, name)
    if distilled or steps < MIN_STEPS:
        too_few = f"{steps} steps, fewer than {MIN_STEPS}, differ too much from each other"
        note = f"{name} is off: {f'{distilled}; if it is not, change that' if distilled else too_few}"
        return replace(plan, unskipped=full, notes=(*plan.notes, note))
    highest = max(step.guidance for step in plan.steps)
    if highest > HIGH_GUIDANCE:
        note = f"guidance {highest:g}: {name} was judged at 3 to 4; at 7 it made another video: compare with none"
        plan = replace(plan, notes=(*plan.notes, note))
    if options.magcache is not None:
        return replace(skip_magcache(plan, options.magcache, check_curve(curve, plan.name)), unskipped=full)
    assert options.taylorseer is not None
    return replace(skip_taylorseer(plan, options.taylorseer), unskipped=full)


def skip_words(options: SkipOptions) -> str:
    """The options in the form of the command line: `magcache 0.12/2/0.2, sparse 0.5`."""
    settings: list[str] = []
    if cache := options.magcache:
        settings.append(f"magcache {slashes(cache, 'threshold', 'max_skips', 'retention')}")
    if seer := options.taylorseer:
        settings.append(f"taylorseer {slashes(seer)}")
    settings += [] if options.sparse is None else [f"sparse {options.sparse.words()}"]
    settings += [f"speed {options.speed}"] * (options.speed != EXACT)
    return ", ".join(settings) or "nothing is left out"
