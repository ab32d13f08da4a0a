"""The tasks that checkpoints were trained for, and the settings that a user may leave out because of them."""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.config.checks import OptionError


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a family of checkpoints was trained and tuned for: the defaults of everything a user may leave out.

    Guidance is named by expert, never a tuple: the official config lists (low, high), other tools [high, low].
    Source: Wan2.2/wan/configs/*.py.
    """

    name: str
    in_channels: int
    two_experts: bool
    boundary: float  # the high-noise expert runs where timestep >= boundary * 1000; 0: one model runs every step
    shift: float
    steps: int
    guidance_high: float
    guidance_low: float
    width: int
    height: int
    frames: int
    fps: int
    negative_prompt: str = (
        "blurry, low quality, jpeg artefacts, overexposed, washed-out colours, still picture, subtitles, watermark, "
        "deformed hands, extra fingers, extra limbs, distorted face, cluttered background, walking backwards"
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="t2v-A14B", in_channels=16, two_experts=True, boundary=0.875, shift=12.0, steps=40,
             guidance_high=4.0, guidance_low=3.0, width=1280, height=720, frames=81, fps=16),
        Task(name="i2v-A14B", in_channels=36, two_experts=True, boundary=0.9, shift=5.0, steps=40,
             guidance_high=3.5, guidance_low=3.5, width=1280, height=720, frames=81, fps=16),
        Task(name="ti2v-5B", in_channels=48, two_experts=False, boundary=0.0, shift=5.0, steps=50,
             guidance_high=5.0, guidance_low=5.0, width=1280, height=704, frames=121, fps=24),
        # the embedded model, see docs/design.md
        Task(name="t2v-tiny", in_channels=16, two_experts=True, boundary=0.875, shift=5.0, steps=20,
             guidance_high=3.0, guidance_low=3.0, width=96, height=96, frames=17, fps=8, negative_prompt=""),
        Task(name="i2v-tiny", in_channels=36, two_experts=True, boundary=0.9, shift=5.0, steps=20,
             guidance_high=3.0, guidance_low=3.0, width=96, height=96, frames=17, fps=8, negative_prompt=""),
    )
}  # fmt: skip


def find_task(name: str) -> Task:
    """The task called `name`, any case. Raises OptionError listing the known ones."""
    for known, task in TASKS.items():
        if known.lower() == name.lower():
            return task
    raise OptionError(f"task {name!r} is not known; use one of: {', '.join(TASKS)}")
