"""Make docs/demo.png: frames of videos that the embedded model makes from captions it was never trained on.

python -m tools.demo_picture
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from wan_core import LoadOptions, Pipeline, Request
from wan_core.media.pictures import write_sheet
from wan_lab.metrics import judge
from wan_lab.shapes import SCENES, held_out

CHOSEN = (("circle", "right"), ("cross", "up"), ("square", "left"), ("triangle", "down"))  # one of each, seed 0


def main() -> None:
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    rows: list[np.ndarray] = []
    used: set[str] = set()
    for shape, motion in CHOSEN:
        suitable = (s for s in SCENES if held_out(s) and (s.shape, s.motion) == (shape, motion))
        scene = next(s for s in suitable if s.colour not in used)
        used.add(scene.colour)
        frames = pipe.generate(Request(prompt=scene.caption, seed=0)).frames
        print(scene.caption, judge(torch.from_numpy(frames), scene))
        rows.append(frames)
    sheets = []
    for i, frames in enumerate(rows):
        path = Path(f"out/demo-{i}.png")
        path.parent.mkdir(exist_ok=True)
        with Image.open(write_sheet(path, frames)) as sheet:
            sheets.append(np.pad(np.asarray(sheet), ((0, 4), (0, 0), (0, 0)), constant_values=255))
    Image.fromarray(np.concatenate(sheets)[:-4]).save("docs/demo.png", optimize=True)


if __name__ == "__main__":
    main()
