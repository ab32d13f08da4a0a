"""Make docs/images/distilled.png: the embedded model in 40 guided steps, in 4 with its LoRAs, and in 4 without them.

python -m tools.distilled_picture

Captions and seeds are those of the committed comparison (`tools.distill_tiny`), from number 11 on: the first of it that
show what 4 steps are without the LoRAs. Each row is one caption; all three start from the same noise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tools.tiny.clips import held_out_scenes
from wan_core import LoadOptions, Pipeline, Request

FIRST, ROWS, FRAMES = 11, 6, 4
GAP, LINE, HEAD = 12, 2, 26
COLUMNS = {
    "40 steps, guidance: 80 forwards": {"steps": 40, "guidance_high": 3.0, "guidance_low": 3.0},
    "4 steps, LoRA: 4 forwards": {"preset": "4-step"},
    "4 steps, no LoRA: 4 forwards": {"steps": 4, "guidance_high": 1.0, "guidance_low": 1.0},
}


def main() -> None:
    scenes = list(enumerate(held_out_scenes(FIRST + ROWS)))[FIRST:]
    columns: list[np.ndarray] = []
    for title, settings in COLUMNS.items():
        plain = LoadOptions(model="tiny", device="cpu")
        pipe = Pipeline.load(plain, request=Request(prompt="", **settings))
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


if __name__ == "__main__":
    main()
