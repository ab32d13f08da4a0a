"""What is probably a mistake in a plan that can run: sentences that say what was given, why it spoils the video, and
what to do. Decided by numbers and by what files say of themselves, before any step of the schedule is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from wan_core.config.file_names import FileSays
from wan_core.models.wan.families.task import Task
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Step, lora_share

FEWEST_STEPS = 9  # of weights that are not step-distilled; with fewer, videos are blurred
MOST_TIMES = 3  # as many guided steps as weights are distilled for
HIGHEST_GUIDANCE = 15.0
HIGHEST_SHIFT = 25.0


def likely_mistakes(
    plan: Plan, task: Task, files: Sequence[FileSays], loras: Sequence[FileSays], known: bool
) -> tuple[str, ...]:
    """The sentences, none where nothing is wrong. files: of the experts. loras: of both. known: there are no others."""
    distilled = [one for one in (*files, *loras) if one.steps is not None]
    sentences = number_mistakes(plan, task)
    whole = not plan.from_latents and plan.steps[-1].finishes
    if known and files and not distilled and not task.distilled and whole:
        sentences += undistilled(plan, task)
    sentences += [said for one in distilled if (said := too_guided(plan, one, one in loras))]
    if task.distilled and plan.guided and plan.count >= MOST_TIMES * task.steps:
        own = FileSays(task.name, task.steps)
        sentences.append(guided_words(plan.steps, own))
    return tuple(sentences)


def number_mistakes(plan: Plan, task: Task | None) -> list[str]:
    """What is far beyond any use, whatever the model."""
    sentences = []
    highest = max(step.guidance for step in plan.steps)
    if highest > HIGHEST_GUIDANCE:
        usual = "" if task is None else f": {task.guidance_high:g} is usual for {task.name}"
        sentences.append(f"guidance {highest:g} burns colours and tears pictures{usual}")
    if plan.shift > HIGHEST_SHIFT:
        usual = "" if task is None else f": {task.shift:g} is usual for {task.name}"
        sentences.append(f"shift {plan.shift:g} spends nearly all steps on noise, and details stay blurred{usual}")
    return sentences


def undistilled(plan: Plan, task: Task) -> list[str]:
    """A sentence where weights that are not step-distilled run as those that are: in few steps, or unguided."""
    few, unguided = plan.count < FEWEST_STEPS, task.guidance_high > 1 and not plan.guided
    if not few and not unguided:
        return []
    how = f"{plan.count} step{'s' * (plan.count != 1)}" if few else f"{plan.count} steps without guidance"
    return [
        f"{how}, and no file says by its metadata or name that it is step-distilled: without such a LoRA or model the "
        f"video is blurred. Add a four-step LoRA (docs/models.md), or take preset none, {task.steps} steps and "
        f"guidance {task.guidance_high:g}"
    ]


def too_guided(plan: Plan, file: FileSays, lora: bool) -> str:
    """A sentence where steps with a step-distilled file are guided: many of them, or those of the low-noise expert."""
    assert file.steps is not None
    guided = [step for step in plan.steps if "uncond" in step.branches and runs_with(step, file, lora)]
    low = [step for step in guided if step.expert == "low"]
    if guided and plan.count >= MOST_TIMES * file.steps:
        return guided_words(guided, file)
    return guided_words(low, file) if low else ""


def runs_with(step: Step, file: FileSays, lora: bool) -> bool:
    if file.expert not in (None, step.expert):
        return False
    return not lora or lora_share(step.loras, step.expert, file.name) != 0


def guided_words(steps: Sequence[Step], file: FileSays) -> str:
    count = len(steps)
    return (
        f"{count} step{'s' * (count != 1)} with guidance {steps[0].guidance:g} and {file.name}, which is distilled for "
        f"{file.steps} steps without guidance: colours burn, and each guided step takes twice as long. Leave steps and "
        "guidance out, or leave the file out"
    )
