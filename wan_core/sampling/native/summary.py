"""What WanCore Accelerate did in a sampling run, in a user's words: what was saved, how long a step took and by which
kernel, what would help next. The counts behind it are those of `NativeRun.words`, which stand last.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.cards import FP8_SINCE, Capability, card_of
from wan_core.sampling.native.attention import AS_CHOSEN, CROSS
from wan_core.sampling.native.run import COMPARED, WARNING, NativeRun
from wan_core.sampling.sparsity.schedule import step_cost

FEW_STEPS = 8  # of step-distilled models at most
INSTALLED_BY = {"flash4": "pip install --pre flash-attn-4"}


def report_text(run: NativeRun, share: float, advice: str | None) -> str:
    """The lines for a finished run. share: of self-attention in a dense forward's time. advice: for the next run."""
    warnings = [note for note in run.notes if note.startswith(WARNING)]
    if not run.began:  # a part of a schedule without a step: nothing to warn of
        return "; ".join([f"WanCore Accelerate: {run.words()}", *(note.removeprefix(WARNING) for note in warnings)])
    elsewhere = ", ".join(
        f"{count} {why}" for why, count in run.left.items() if why not in (CROSS, AS_CHOSEN, COMPARED)
    )
    if not run.taken and AS_CHOSEN not in run.left and not warnings:
        warnings.append(f"{WARNING}self-attention stayed with ComfyUI: {elsewhere or 'no call came to WanCore'}")
        elsewhere = ""
    what = saved(run, share)
    lines = [what, pace(run, bool(what))]
    lines += ["compare 'on' shows in the next run what was gained"] if run.offers and run.part.steps > 1 else []
    lines += [f"left to ComfyUI: {elsewhere}"] if elsewhere else []
    lines += [f"next: {advice}"] if advice else []
    return "\n".join([*warnings, *filter(None, lines), f"WanCore Accelerate: {run.words()}"])


def saved(run: NativeRun, share: float) -> str:
    """What was not computed, and what that is worth; empty where all was."""
    skipped, forwards = run.skipped
    words = [f"{skipped} of {forwards} forwards skipped"] if skipped else []
    computed = run.part.steps * (1 - skipped / max(forwards, 1))
    costs = 0.0
    reads = run.reads
    if run.sparse is not None and reads:
        some = "" if len(reads) >= round(computed) else f" in {len(reads)} of {round(computed)} steps"
        words.append(f"attention reads {100 * sum(reads) / len(reads):.0f} % of the keys{some}")
        costs = sum(step_cost(1 - read, share, run.sparse.slope) for read in reads)
    if not words:
        return ""
    relative = (costs + max(0.0, computed - len(reads))) / run.part.steps
    times = f": about {1 / relative:.1f} times as fast, estimated" if relative < 0.95 and not run.before else ""
    return ", ".join(words) + times


def pace(run: NativeRun, omitted: bool) -> str:
    """The seconds of a step, or of all and what ComfyUI's own take, and which kernel computed attention. omitted: a
    part of the forwards or of attention."""
    kernels = " and ".join(run.taken) or "ComfyUI"
    if not run.seconds:
        return f"attention by {kernels}"
    steps = run.part.steps
    if not run.before:
        untimed = "; the last step was not computed, so there is nothing to compare" if run.compare else ""
        return f"{_seconds(run.seconds / steps)} a step; attention by {kernels}{untimed}"
    each = (run.seconds - run.before) / (steps - 1)
    exact = not omitted and all(name in BACKENDS and BACKENDS[name].exact for name in run.taken)
    changed = "; nothing changed but rounding" if exact else ""
    gained = f"{_seconds(steps * each)} instead of {_seconds(steps * run.before)} for {steps} steps"
    return f"{gained}, by one without WanCore{changed}; attention by {kernels}"


def _seconds(value: float) -> str:
    return f"{value:.{1 if value >= 1 else 2}f} s"


def advice_for(run: NativeRun, kernels: Sequence[str], card: Capability | None, bytes_each: float) -> str | None:
    """The next thing that would help, in one sentence; None where nothing is known. kernels: backends whose library is
    missing here, fastest first. card: its compute capability. bytes_each: of a weight."""
    better = next((name for name in kernels if name in INSTALLED_BY), None)
    if better is not None:
        return f"{INSTALLED_BY[better]} ({BACKENDS[better].summary}): faster attention, the same video"
    if run.part.total > FEW_STEPS:
        return f"a four-step LoRA (lightx2v) needs 4 steps in place of {run.part.total}"
    if bytes_each > 1.5 and card is not None and card >= FP8_SINCE:
        return "the FP8 file of this model (fp8_scaled) takes half the memory and is faster on this card"
    return None


def missing_kernels(card: Capability | None) -> list[str]:
    """Exact backends that were measured to be faster on this card than what runs, and whose library is missing."""
    row = card_of(card)
    if card is None or row.measured.startswith("not") or not sys.platform.startswith("linux"):
        return []
    works = next((i for i, name in enumerate(row.attention) if BACKENDS[name].missing() is None), 0)
    return list(row.attention[:works])
