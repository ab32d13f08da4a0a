"""Make pictures of the docs with the embedded model: `python -m tools.pictures demo`, `distilled` or `plan`.

demo        docs/demo.png: frames of videos from captions that it was never trained on
distilled   docs/images/distilled.png: 40 guided steps, 4 with its LoRAs, and 4 without them. Captions and seeds are
            those of the committed comparison (`tools.distill_tiny`), from number 11 on: the first of it that show what
            4 steps are without the LoRAs. Each row is one caption; all three start from the same noise
plan        docs/images/plan.gif: the plan of a video beside what the model has made of it after each step
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tools.tiny.clips import held_out_scenes
from wan_core import LoadOptions, Pipeline, Request
from wan_core.config import SkipOptions, TaylorSeerOptions
from wan_core.media.pictures import write_sheet
from wan_core.pipeline.decode import decode_latents
from wan_core.pipeline.run import Watch
from wan_core.sampling.denoise import Progress
from wan_core.sampling.plan_drawing import draw_plan
from wan_lab.metrics import judge
from wan_lab.shapes import SCENES, held_out

TINY = LoadOptions(model="tiny", device="cpu")
LINE = 2  # pixels between frames

# ---------------------------------------------------------------------------------------------------------------- demo

CHOSEN = (("circle", "right"), ("cross", "up"), ("square", "left"), ("triangle", "down"))  # one of each, seed 0


def demo() -> None:
    pipe = Pipeline.load(TINY)
    folder, sheets, used = Path("out"), [], set[str]()
    folder.mkdir(exist_ok=True)
    for shape, motion in CHOSEN:
        suitable = (s for s in SCENES if held_out(s) and (s.shape, s.motion) == (shape, motion))
        scene = next(s for s in suitable if s.colour not in used)
        used.add(scene.colour)
        frames = pipe.generate(Request(prompt=scene.caption, seed=0)).frames
        print(scene.caption, judge(torch.from_numpy(frames), scene))
        with Image.open(write_sheet(folder / f"demo-{len(sheets)}.png", frames)) as sheet:
            sheets.append(np.pad(np.asarray(sheet), ((0, 4), (0, 0), (0, 0)), constant_values=255))
    Image.fromarray(np.concatenate(sheets)[:-4]).save("docs/demo.png", optimize=True)


# ----------------------------------------------------------------------------------------------------------- distilled

FIRST, ROWS, FRAMES = 11, 6, 4
GAP, HEAD = 12, 26
COLUMNS = {
    "40 steps, guidance: 80 forwards": {"steps": 40, "guidance_high": 3.0, "guidance_low": 3.0},
    "4 steps, LoRA: 4 forwards": {"preset": "4-step"},
    "4 steps, no LoRA: 4 forwards": {"steps": 4, "guidance_high": 1.0, "guidance_low": 1.0},
}


def distilled() -> None:
    scenes = list(enumerate(held_out_scenes(FIRST + ROWS)))[FIRST:]
    columns: list[np.ndarray] = []
    for title, settings in COLUMNS.items():
        pipe = Pipeline.load(TINY, request=Request(prompt="", **settings))
        rows = []
        for number, scene in scenes:
            frames = pipe.generate(Request(prompt=scene.caption, seed=10_000 + number, **settings)).frames
            chosen = frames[np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)]
            rows.append(
                np.concatenate([np.pad(f, ((0, LINE), (0, LINE), (0, 0)), constant_values=255) for f in chosen], 1)
            )
        columns.append(np.concatenate(rows))
        print(title, columns[-1].shape)
    height, width = columns[0].shape[:2]
    sheet = Image.new("RGB", (len(columns) * (width + GAP) - GAP, HEAD + height), "white")
    write = ImageDraw.Draw(sheet)
    for place, (title, column) in enumerate(zip(COLUMNS, columns, strict=True)):
        left = place * (width + GAP)
        sheet.paste(Image.fromarray(column), (left, HEAD))
        write.text((left + width / 2, HEAD / 2), title, "black", ImageFont.load_default(15), "mm")
    path = Path("docs/images/distilled.png")
    # A palette without dithering: plain colours stay plain, and the file small.
    sheet.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size, "bytes")


# ---------------------------------------------------------------------------------------------------------------- plan

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


def plan() -> None:
    pipe = Pipeline.load(TINY)
    steps = pipe.prepare(REQUEST).job.plan
    predicted: list[Tensor] = []

    def keep(progress: Progress, _: object) -> None:  # the video as this step predicts it
        predicted.append(progress.latents - progress.step.sigma_next * progress.velocity)

    frames = pipe.generate(REQUEST, Watch(step=keep)).frames
    vae = pipe.models.vae()
    with torch.inference_mode():
        shown = [decode_latents(vae, vae.denormalise(latents), pipe.report) for latents in predicted]
    middle = len(frames) // 2
    drawn = draw_plan(steps, size=DRAWN)
    pictures = [page(drawn, Image.fromarray(one[middle]), step, len(shown)) for step, one in enumerate(shown)]
    pictures += [page(drawn, Image.fromarray(frame), len(shown), len(shown)) for frame in frames]
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
    pictures = {"demo": demo, "distilled": distilled, "plan": plan}
    if len(sys.argv) != 2 or sys.argv[1] not in pictures:
        sys.exit(__doc__)
    pictures[sys.argv[1]]()
