"""What a user asked to leave out, applied to a plan in order: guidance first, because it decides which branches there
are, then the policy that skips their steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wan_core.config import OptionError, SkipOptions
from wan_core.sampling.cache.adaptive import mark_adaptive
from wan_core.sampling.cache.curves import Curve, find_curve
from wan_core.sampling.cache.guidance import schedule_guidance
from wan_core.sampling.cache.magcache import skip_magcache
from wan_core.sampling.cache.taylorseer import skip_taylorseer
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.budgets import find_keeps
from wan_core.sampling.sparsity.schedule import sparse_words, sparsify

MIN_STEPS = 10
# What the authors of step-distilled weights call them. The weights themselves look like any others. A number of steps
# counts where it stands alone: "4steps", "4-step", but not the "3-step-1200" of a training run's epoch and step.
_DISTILLED = re.compile(
    r"distill|lightning|lightx2v|causvid|turbo|\b[1-8](?:steps?|-steps|-step(?!-?\d))\b", re.IGNORECASE
)


def looks_distilled(checkpoint: Path) -> bool:
    """Whether a file's name, or its folder's, says that the weights are made for a few steps."""
    return _DISTILLED.search(f"{checkpoint.parent.name} {checkpoint.name}".replace("_", "-")) is not None


def skip_forwards(
    plan: Plan,
    options: SkipOptions | None,
    checkpoint: Path | None,
    low: Path | None = None,
    *,
    image: bool = False,
    loras: Sequence[Path] = (),
) -> Plan:
    """`leave_out` with what is known of a model: the curve beside its checkpoint or published for its task, and whether
    it is step-distilled; before it, sparse attention with the budgets beside its checkpoints.

    checkpoint: of the high-noise expert, or of the only transformer; low: of the other expert. image: TI2V starts from
    one. loras: files on either expert."""
    if options is None:
        return plan
    if options.sparse is not None:
        keeps = find_keeps(plan, options.sparse, checkpoint, low) if options.sparse.budgets else {}
        plan = sparsify(plan, options.sparse, keeps)
    curve = find_curve(checkpoint, plan.task, image=image) if options.magcache else None
    distilled = [path.name for path in (checkpoint, low, *loras) if path is not None and looks_distilled(path)]
    return leave_out(plan, options, curve, distilled="".join(distilled[:1]))


def leave_out(plan: Plan, options: SkipOptions | None, curve: Curve | None, *, distilled: str = "") -> Plan:
    """`plan` without the forwards that `options` leaves out; what was decided is in its notes.

    curve: for MagCache. distilled: the name of the file whose weights are made for a few steps. Policies that skip
    steps switch themselves off there, and below 10 steps: consecutive steps are too far apart to be alike. Raises
    OptionError where MagCache has no curve.
    """
    if options is None:
        return plan
    full, steps = plan.forwards, len(plan.steps)
    if options.guidance is not None:
        plan = schedule_guidance(plan, options.guidance)
    policy = options.magcache or options.taylorseer or options.adaptive
    if policy is None:
        return replace(plan, unskipped=full)
    name = "MagCache" if options.magcache else "TaylorSeer" if options.taylorseer else "the adaptive cache"
    if distilled or steps < MIN_STEPS:
        few = f"{steps} steps, fewer than {MIN_STEPS}, too far apart for one to stand in for another"
        says = f"the weights are step-distilled: the name of {distilled} or of its folder says so; rename to override"
        note = f"{name} is off: {says if distilled else few}"
        return replace(plan, unskipped=full, notes=(*plan.notes, note))
    if options.magcache:
        if curve is None:
            raise OptionError(
                f"MagCache needs a curve of the model, and {plan.task} has none: run `python -m wan_core calibrate`, "
                "or choose taylorseer, which needs none"
            )
        return replace(skip_magcache(plan, options.magcache, curve), unskipped=full)
    if options.taylorseer:
        return replace(skip_taylorseer(plan, options.taylorseer), unskipped=full)
    assert options.adaptive is not None
    note = "adaptive: which of the steps marked so are skipped is decided while running"
    return replace(mark_adaptive(plan, options.adaptive), unskipped=full, notes=(*plan.notes, note))


def skip_words(options: SkipOptions) -> str:
    """The options as they are typed: `magcache 0.12/2/0.2, guidance every 2`."""
    words: list[str] = []
    if cache := options.magcache:
        words.append(f"magcache {cache.threshold:g}/{cache.max_skips}/{cache.retention:g}")
        words += [f"rule {cache.rule}"] * (cache.rule != "joint") + [f"order {cache.order}"] * (cache.order > 0)
    if seer := options.taylorseer:
        words.append(f"taylorseer {seer.interval}/{seer.order}/{seer.retention:g}")
    if adaptive := options.adaptive:
        words.append(f"adaptive {adaptive.threshold:g}/{adaptive.max_skips}/{adaptive.retention:g}")
    if guidance := options.guidance:
        words += [f"guidance in {guidance.low:g}-{guidance.high:g}"] * ((guidance.low, guidance.high) != (0, 1))
        words += [f"guidance every {guidance.every}"] * (guidance.every > 1)
    words += [] if options.sparse is None else [f"sparse {sparse_words(options.sparse)}"]
    return ", ".join(words) or "nothing"
