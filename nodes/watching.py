"""What the sampler does beside sampling: progress, preview, making room after out of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from wan_core.media.pictures import clock
from wan_core.models.wan.families import family_of
from wan_core.pipeline.check import size_notes
from wan_core.pipeline.comfy_conditioning import Joined
from wan_core.pipeline.embedded import unknown_to
from wan_core.sampling.denoise import Progress
from wan_core.sampling.plan import Expert, Plan

from . import host
from .sockets import ModelSocket


def unknown_of(model: ModelSocket, joined: Joined, shape: tuple[int, ...]) -> list[str]:
    """What the model is asked for and never saw. shape: of the latents, [B, C, T, Y, X]."""
    task, vae = model.experts.task, model.experts.vae
    rules = family_of(task).clips
    leading = rules.leading  # of a reference
    latents = max(joined.plan.window_sizes(shape[2])) - leading
    width, height = shape[4] * vae.spatial_stride, shape[3] * vae.spatial_stride
    unknown = unknown_to(task, joined.prompts, width, height, vae.temporal_stride * (latents - 1) + 1)
    return [*unknown, *size_notes(task, vae, width, height)]


class Watcher:
    """After every step: the preview, the bar and how long the rest will take. Raises where the user interrupts.
    `forwards`: that ran, which a plan that decides while running does not know, each as the part that it costs.
    warnings: lines that stay above."""

    def __init__(self, model: ModelSocket, plan: Plan, warnings: Sequence[str] = ()) -> None:
        self.warnings = warnings
        self.forwards: dict[Expert, float] = defaultdict(float)
        self.rgb = model.rgb
        self.frames_per_second = model.experts.task.fps / model.experts.vae.temporal_stride
        self.progress = host.Progress(plan.count)

    def __call__(self, progress: Progress, seconds: float | None) -> None:
        step, plan = progress.step, progress.plan
        done, total = plan.number(step), plan.count
        self.forwards[step.expert] += progress.forwards * step.cost
        each = 0.0 if seconds is None else seconds * len(step.branches) * step.cost
        left = "" if seconds is None else f", {each:.3g} s a step, {clock(progress.left(seconds))} left"
        pictures = self.rgb.pictures(progress.preview()) if self.rgb else []
        words = f"step {done} of {total}, {step.expert}-noise expert{left}"
        self.progress.update(done, total, "\n".join([*self.warnings, words]), pictures, self.frames_per_second)

    def close(self) -> None:
        self.progress.close()
