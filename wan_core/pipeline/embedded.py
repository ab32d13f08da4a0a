"""What the embedded model was not trained on: its videos of that are noise, and a user should know why."""

from __future__ import annotations

from wan_core.media.shapes import FRAMES, parse_caption
from wan_core.pipeline.resolved_request import Job

SIDES = (64, 128)  # pixels: the smallest and the largest side in training
EXAMPLE = "a red circle moving right on a blue background"


def never_seen(job: Job) -> list[str]:
    """Sentences about what the embedded model is asked for and never saw; none for other models."""
    if job.task.release != "embedded":
        return []
    notes = []
    if not job.task.driven_by and not is_caption(job.request.prompt):  # a driving video says what moves
        notes.append(f"the embedded model knows only captions such as {EXAMPLE!r}; of other prompts it makes no sense")
    low, high = SIDES
    if not low <= min(job.width, job.height) <= max(job.width, job.height) <= high:
        notes.append(
            f"the embedded model saw sides of {low} to {high} pixels in training; {job.width}x{job.height} is asked for"
        )
    windows = job.plan.context_windows
    longest = max(clip.frames for clip in job.clips) if windows is None else 4 * windows.length - 3
    if longest > FRAMES:
        notes.append(f"the embedded model saw videos of {FRAMES} frames in training; {longest} are asked for")
    return notes


def is_caption(prompt: str) -> bool:
    try:
        parse_caption(prompt)
    except ValueError:
        return False
    return True
