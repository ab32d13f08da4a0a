"""Context windows in a plan: which latent frames each forward of a step sees, and how much each window counts.

A forward sees no more frames than a model was trained on, however long the video is. In every step each window is
predicted alone, and `fuse_weights` says how much of it goes into each frame. Windows that move from step to step
(`standard_uniform`, `looped_uniform`) have their borders elsewhere each time. Rules and names are those of ComfyUI's
comfy/context_windows.py (0.33), so that the same settings give the same video. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wan_core.config import OptionError, WindowOptions
from wan_core.models.wan.families import check_windows
from wan_core.sampling.plan import Plan

Windows = tuple[tuple[int, ...], ...]
LEAST = 1e-37  # weight at the border of an overlap
FAINT = 1e-2  # the least weight of the fuse method relative, and what keeps it from dividing by 0


def with_windows(plan: Plan, options: WindowOptions, frames: int) -> Plan:
    """`plan`, whole, in windows of a video of so many latent frames; as it is where one window holds them all.

    A moving schedule counts the steps of each expert from its first one, as ComfyUI's samplers do, of which each
    expert has one. Raises OptionError for a task whose models windows do not fit.
    """
    task = plan.task
    assert task is not None
    check_windows(task)
    if options.retain_first and task.image != "channels":
        raise OptionError(f"{task.name} has no image beside its noise that context windows could retain: leave it out")
    fits = frames <= options.length
    note = f"context windows {options.words()}: {frames} latent frames fit into one"
    if not fits:
        sigmas = {expert: sorted({s.sigma for s in plan.steps if s.expert == expert})[::-1] for expert in plan.experts}
        places = {step.index: sigmas[step.expert].index(step.sigma) for step in plan.steps}
        steps = tuple(replace(step, windows=windows_of(options, frames, places[step.index])) for step in plan.steps)
        plan = replace(plan, steps=steps, context_windows=options)
        counts = sorted({len(step.windows) for step in steps})
        most = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        note = (
            f"context windows {options.words()}: {most} of {options.length} of {frames} latent frames, each a forward "
            "of its own"
        )
    return replace(plan, notes=(*plan.notes, note))


def check_still(plan: Plan, what: str) -> None:
    """Raise OptionError where windows move, and `what` uses in a step what an earlier one kept of the same frames."""
    options = plan.context_windows
    if options is not None and options.moves:
        raise OptionError(
            f"{what} keeps something of each window, and context windows of the schedule {options.schedule} move from "
            "step to step: use standard_static or batched, or leave one of them out"
        )


def windows_of(options: WindowOptions, frames: int, step: int) -> Windows:
    """The windows of `frames` latent frames, more than one window has, in a step with this number."""
    length, stride = options.length, options.length - options.overlap
    if options.schedule == "batched":
        return tuple(tuple(range(first, min(first + length, frames))) for first in range(0, frames, length))
    if options.schedule == "standard_static":
        count = -(-(frames - length) // stride) + 1
        return tuple(window_at(min(n * stride, frames - length), length) for n in range(count))
    shift = round(frames * ordered_halving(step))
    end = frames + shift - (0 if options.closed_loop else options.overlap)
    looped = [[(first + n) % frames for n in range(length)] for first in range(shift, end, stride)]
    if options.schedule == "looped_uniform":
        return tuple(map(tuple, looped))
    return cut_open(looped, frames)


def window_at(first: int, length: int) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def cut_open(looped: list[list[int]], frames: int) -> Windows:
    """`looped` windows with none that goes past the end: it is moved to the end, and one at the first frame follows
    unless the next window has that frame. Those that are there already are left out."""
    windows: list[tuple[int, ...]] = []
    for number, window in enumerate(looped):
        length = len(window)
        if window[-1] >= window[0]:
            windows.append(tuple(window))
            continue
        windows.append(window_at(frames - length, length))
        after = looped[number + 1] if number + 1 < len(looped) else windows[0]
        if 0 not in after:
            windows.append(window_at(0, length))
    return tuple(dict.fromkeys(windows))


def ordered_halving(step: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, ...: the bits of a number behind the point, the lowest first."""
    return int(f"{step:064b}"[::-1], 2) / 2**64


def fuse_weights(windows: Windows, options: WindowOptions, frames: int) -> list[list[float]]:
    """The weight of every window in the prediction of each of its frames; the weights of a frame sum to 1."""
    raw = [window_weights(window, options, frames) for window in windows]
    total = [0.0] * frames
    for window, weights in zip(windows, raw, strict=True):
        for frame, weight in zip(window, weights, strict=True):
            total[frame] += weight
    return [[w / total[f] for f, w in zip(*pair, strict=True)] for pair in zip(windows, raw, strict=True)]


def window_weights(window: Sequence[int], options: WindowOptions, frames: int) -> list[float]:
    """How much each frame of a window counts, above 0."""
    length = len(window)
    if options.fuse == "pyramid":
        return [float(min(n + 1, length - n)) for n in range(length)]
    if options.fuse == "relative":
        middle, half = (window[0] + window[-1]) / 2, (window[-1] - window[0] + FAINT) / 2
        return [max(FAINT, 1 - abs(frame - middle) / half) for frame in window]
    weights = [1.0] * length
    if options.fuse == "overlap-linear":
        apart = options.overlap
        ramp = [LEAST + n * (1 - LEAST) / max(1, apart - 1) for n in range(apart)]
        if min(window) > 0:
            weights[:apart] = ramp
        if max(window) < frames - 1 and apart:
            weights[-apart:] = ramp[::-1] if apart > 1 else [1.0]
    return weights
