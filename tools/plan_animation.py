"""Make docs/images/plan.gif: the plan of a video beside what the embedded model has made of it after each step.

python -m tools.plan_animation
"""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from wan_core import LoadOptions, Pipeline, Request
from wan_core.config import SkipOptions, TaylorSeerOptions
from wan_core.pipeline.images import decode_latents
from wan_core.pipeline.watch import Watch
from wan_core.sampling.denoise import Progress
from wan_core.sampling.plan_drawing import draw_plan

REQUEST = Request(
    prompt="a blue cross moving up on a white background",
    steps=20,
    seed=0,
    skip=SkipOptions(taylorseer=TaylorSeerOptions(interval=2)),
)
DRAWN, PLAN, SIDE, EDGE = (900, 480), (600, 320), 192, 24  # pixels: the plan as drawn and as shown, a frame, around it
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 64, 132  # outside of the plan's axes, as draw_plan has them
STEP_MS, FRAME_MS, PAUSE_MS = 220, 90, 700
COLOURS = 48


def main() -> None:
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    job = pipe.prepare(REQUEST)
    predicted: list[Tensor] = []

    def keep(progress: Progress, _: object) -> None:  # the video as this step predicts it
        predicted.append(progress.latents - progress.step.sigma_next * progress.velocity)

    frames = pipe.generate(REQUEST, Watch(step=keep)).frames
    vae = pipe.models.vae()
    with torch.inference_mode():
        shown = [decode_latents(vae, vae.denormalise(latents), pipe.report) for latents in predicted]
    middle = len(frames) // 2
    plan = draw_plan(job.plan, size=DRAWN)
    pictures = [page(plan, Image.fromarray(one[middle]), step, len(shown)) for step, one in enumerate(shown)]
    pictures += [page(plan, Image.fromarray(frame), len(shown), len(shown)) for frame in frames]
    durations = [STEP_MS] * len(shown) + [FRAME_MS] * (len(frames) - 1) + [PAUSE_MS]
    path = Path("docs/images/plan.gif")
    palette = pictures[len(shown) // 2].quantize(COLOURS)  # one for all, so that only what changes is stored
    small = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    small[0].save(path, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True)
    print(path, path.stat().st_size)


def page(plan: Image.Image, frame: Image.Image, step: int, steps: int) -> Image.Image:
    """The plan with a line after `step` of `steps`, and a frame beside it."""
    marked = plan.copy()
    x = LEFT + (DRAWN[0] - LEFT - RIGHT) * min(step + 1, steps) / steps
    ImageDraw.Draw(marked).line((x, TOP, x, DRAWN[1] - BOTTOM), fill=(235, 80, 80), width=3)
    picture = Image.new("RGB", (PLAN[0] + SIDE + EDGE, PLAN[1]), plan.getpixel((0, 0)))
    picture.paste(marked.resize(PLAN, Image.Resampling.LANCZOS))
    picture.paste(frame.resize((SIDE, SIDE), Image.Resampling.NEAREST), (PLAN[0], (PLAN[1] - SIDE) // 2))
    return picture


if __name__ == "__main__":
    main()
