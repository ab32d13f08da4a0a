"""A plan as a picture: the sigma of every step, its expert, its guidance and what is skipped."""

from __future__ import annotations

from PIL import Image

from wan_core.media.pictures import EXPERT_COLOUR, EXPERT_SHADE, FAINT, INK, LINE, PAPER, Canvas, clock
from wan_core.sampling.plan import KnownFrames, Plan, PromptTimes
from wan_core.sampling.steps import Step

SIZE = (960, 540)


def draw_plan(plan: Plan, seconds: float | None = None) -> Image.Image:
    """The sigma of every step, who runs it, the boundary, guidance, branches and skipped steps; RGB.

    seconds: the estimate for the whole run, if there is one.
    """
    canvas = Canvas(*SIZE)
    left, right, top, bottom = 56, SIZE[0] - 24, 64, SIZE[1] - 132
    canvas.text(24, 16, f"{plan.name}   {plan.step_words()}   {plan.solver}   shift {plan.shift:g}", size=17)
    time = "time unknown before a first run" if seconds is None else f"about {clock(seconds)}"
    canvas.text(SIZE[0] - 24, 19, f"{plan.forward_words()}   {time}", FAINT, anchor="ra")
    if plan.known is not None:
        _draw_known(canvas, plan.known, right)
    if plan.prompts is not None:
        _draw_prompts(canvas, plan.prompts, right)

    step_width = (right - left) / len(plan.steps)
    for step in plan.steps:  # whose step it is, behind everything
        x = left + step.index * step_width
        canvas.box(x, top, x + step_width, bottom, EXPERT_SHADE[step.expert])
    _draw_axes(canvas, plan, (left, top, right, bottom))
    _draw_loras(canvas, plan, left, step_width, bottom)
    points = [(left + i * step_width, top + (1 - sigma) * (bottom - top)) for i, sigma in enumerate(plan.sigmas)]
    for step in plan.steps:
        canvas.line(points[step.index : step.index + 2], EXPERT_COLOUR[step.expert], 2)
    for step in plan.steps:
        colour, skipped = EXPERT_COLOUR[step.expert], step.skipped == step.branches
        canvas.dot(*points[step.index], min(4, max(1.5, step_width / 3)), PAPER if skipped else colour, colour)
    _draw_guidance(canvas, plan, left, step_width, bottom + 40)
    if plan.sparse is not None:
        _draw_sparsity(canvas, plan, left, step_width, bottom + 88)
    _draw_legend(canvas, plan, SIZE[1] - 24)
    return canvas.finish()


def _draw_known(canvas: Canvas, known: KnownFrames, right: float) -> None:
    """The frames of the video as a line above the schedule, with a mark and its number for each that is known, and
    empty ones for those that a clip is handed as latents; numbers that have no room are left out."""
    left, y, last = right - 400, 46, -40.0
    what = "of a clip's" if known.handed else "of"
    canvas.text(left - 8, y, f"known {what} {known.frames} frames", FAINT, 11, "rm")
    canvas.line([(left, y), (right, y)], LINE)
    for frame in known.at:
        x = left + (right - left) * frame / max(1, known.frames - 1)
        canvas.dot(x, y, 3, INK, INK)
        if x - last >= 24:
            canvas.text(x, y - 5, f"{frame}", INK, 11, "ms")
            last = x
    for frame in known.handed:
        canvas.dot(left + (right - left) * frame / max(1, known.frames - 1), y, 3, PAPER, INK)


def _draw_prompts(canvas: Canvas, prompts: PromptTimes, right: float) -> None:
    """The frames of the video as a bar above the schedule, cut where a prompt begins, with its number and frame."""
    left, top, bottom = right - 400, 50, 62
    canvas.text(left - 8, 56, f"prompts of {prompts.frames} frames", FAINT, 11, "rm")
    ends = (*prompts.at[1:], prompts.frames)
    for start, end in zip(prompts.at, ends, strict=True):
        begin, until = (left + (right - left) * frame / prompts.frames for frame in (start, end))
        canvas.box(begin, top, until - 1, bottom, PAPER, INK)
        if until - begin >= 24:
            canvas.text(begin + 3, 56, f"{start}", INK, 11, "lm")


def _draw_axes(canvas: Canvas, plan: Plan, area: tuple[float, float, float, float]) -> None:
    left, top, right, bottom = area
    for sigma in (0, 0.25, 0.5, 0.75, 1):
        y = top + (1 - sigma) * (bottom - top)
        canvas.line([(left, y), (right, y)], LINE)
        canvas.text(left - 8, y, f"{sigma:g}", FAINT, 11, "rm")
    canvas.text(left, top - 8, "sigma (share of noise)", FAINT, 11, "ls")
    count = len(plan.steps)
    for index in range(0, count, max(1, -(-count // 20))):
        x = left + (index + 0.5) * (right - left) / count
        canvas.text(x, bottom + 8, f"{index}", FAINT, 11, "mt")
    if 0 < plan.boundary < 1:
        y = top + (1 - plan.boundary) * (bottom - top)
        for x in range(int(left), int(right), 12):
            canvas.line([(x, y), (min(x + 6, right), y)], INK)
        canvas.text(right - 6, y - 4, f"boundary {plan.boundary:g}", INK, 11, "rs")


def _draw_loras(canvas: Canvas, plan: Plan, left: float, step_width: float, bottom: float) -> None:
    """A bracket below the steps in which LoRAs do not have their whole strength."""
    for phase in plan.phases:
        if phase[0].loras:
            start, end = left + phase[0].index * step_width, left + (phase[-1].index + 1) * step_width
            canvas.box(start + 1, bottom - 44, end - 1, bottom - 26, PAPER, INK)
            shares = ", ".join(dict.fromkeys(f"{share:g}" for _, share in phase[0].loras))
            canvas.text((start + end) / 2, bottom - 35, f"LoRA x {shares}", INK, 11, "mm")


def _draw_guidance(canvas: Canvas, plan: Plan, left: float, step_width: float, top: float) -> None:
    """A cell per step, its lower half the conditional branch, its upper half the other where there is one: filled where
    the blocks run. Numbers where they change."""
    canvas.text(left - 8, top + 12, "guid.", FAINT, 11, "rm")
    before: Step | None = None
    for step in plan.steps:
        x, colour = left + step.index * step_width, EXPERT_COLOUR[step.expert]
        guided = "uncond" in step.branches
        halves = {"uncond": (top, top + 12), "cond": (top + 12, top + 24)}
        for branch in step.branches:
            if branch not in step.skipped:
                canvas.box(x + 0.5, halves[branch][0], x + step_width - 0.5, halves[branch][1], colour, colour)
        canvas.box(x + 0.5, top if guided else top + 12, x + step_width - 0.5, top + 24, None, colour)
        if before is None or (before.guidance, before.expert) != (step.guidance, step.expert):
            canvas.text(x + 4, top + 30, f"{step.guidance:g}" + ("" if guided else " (off)"), colour, 12)
        before = step


def _draw_sparsity(canvas: Canvas, plan: Plan, left: float, step_width: float, top: float) -> None:
    """A bar per step that computes: the share of the keys that attention reads."""
    canvas.text(left - 8, top + 5, "keys", FAINT, 11, "rm")
    for step in plan.steps:
        x, colour = left + step.index * step_width, EXPERT_COLOUR[step.expert]
        if step.forwards:
            canvas.box(x + 0.5, top + 10 * step.sparsity, x + step_width - 0.5, top + 10, colour, colour)


def _draw_legend(canvas: Canvas, plan: Plan, y: float) -> None:
    x = 56.0
    for expert in plan.experts:
        count = sum(step.expert == expert and not step.correction for step in plan.steps)
        canvas.dot(x, y, 5, EXPERT_COLOUR[expert], EXPERT_COLOUR[expert])
        label = f"{expert}-noise expert: {count} steps" if plan.boundary else f"one model: {count} steps"
        canvas.text(x + 12, y, label, INK, 12, "lm")
        x += 210
    skipped = sum(step.action != "compute" for step in plan.steps)
    if skipped:
        canvas.dot(x, y, 5, PAPER, INK)
        whole = all(step.skipped in ((), step.branches) for step in plan.steps)
        label = "skipped" if whole else "skipped in all or part"
        canvas.text(x + 12, y, f"{label}: {skipped} steps", INK, 12, "lm")
