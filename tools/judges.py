"""What the words of `speed` keep of a video, on every judge that there is: the embedded models and the test bed.

    python -m tools.judges --out benchmarks/results                               # the embedded models
    python -m tools.judges --out benchmarks/results --judge "test bed, text" --testbed FOLDER --count 16 --batch 1
    python -m tools.judges --out benchmarks/results --judge "test bed, text, whole size" --testbed FOLDER --count 16 \
        --batch 1 --steps 40 --device cuda                                        # 160 s a clip on two CPU cores

A judge makes every clip in full and at each word from the same noise, and compares the frames: `truth` is the
share of clips that show their caption (shape, colours and motion; on the test bed the colours; driven: the motion of
the driving video). Clips are made in batches. Rows go into one file of a day:
those of a judge that is measured again, in the same steps and precision, are replaced.

`bf16` (`--rounded`) is the full run with weights and activations in bfloat16: how far a video moves where nothing is
left out. `--precision` and `--attention` are those of all other runs, the full one too: with FP8, the row `bf16` is
FP8's own rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.testbed.full_runs import FullRuns
from wan_core.config import SPEEDS, LoadOptions, Request
from wan_core.config.skipping import parse_setting
from wan_core.media.pictures import save_picture
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY_DRIVEN, for_request
from wan_lab.compare import truth
from wan_lab.pictures import draw_quality
from wan_lab.results import envelope, result_path, write_result
from wan_lab.run import FULL, Measured, measure_quality
from wan_lab.samples import Sample, choose_samples, read_samples

SUITE = "judges"
ROUNDED = "bf16"


@dataclass(frozen=True)
class Judge:
    """A model, and the size of its videos (frames None: as the model's own); a part of the test bed has no task.
    steps: that the embedded LoRAs are for, with which it runs; None: without them."""

    name: str
    size: tuple[int, int]
    task: str | None = None
    part: str = ""
    frames: int | None = None
    steps: int | None = None


JUDGES = {
    judge.name: judge
    for judge in (
        Judge("embedded, text", (96, 96), "t2v-tiny"),
        Judge("embedded, image", (96, 96), "i2v-tiny"),
        Judge("embedded, text, larger", (128, 128), "t2v-tiny"),
        Judge("embedded, text, four steps", (96, 96), "t2v-tiny", steps=4),
        Judge("embedded, driven", (96, 96), TINY_DRIVEN),
        Judge("embedded, text, long", (96, 96), "t2v-tiny", frames=241),  # 2,196 tokens
        Judge("test bed, text", (192, 128), part="t2v", frames=41),
        Judge("test bed, image", (192, 128), part="i2v", frames=41),
        Judge("test bed, text, whole size", (384, 256), part="t2v", frames=41),
        Judge("test bed, image, whole size", (384, 256), part="i2v", frames=41),
    )
}


def main() -> int:
    options = parser().parse_args()
    if options.draw is not None:
        draw(options)
        return 0
    torch.set_num_threads(options.threads)
    names = options.judge or [name for name, judge in JUDGES.items() if judge.frames is None]
    for name in names:
        total: Measured | None = None
        for part in measured_parts(JUDGES[name], options):
            total = part if total is None else joined(total, part)
            print(write(JUDGES[name], total, options), file=sys.stderr)
    return 0


def write(judge: Judge, measured: Measured, options: argparse.Namespace) -> Path:
    """Write what is there of a judge, beside what the file has of others."""
    device = torch.device(options.device)
    path = result_path(options.out, SUITE, device)
    result = envelope(SUITE, device, rows_of(judge, measured, options), program="tools.judges")
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        about = {"judge": judge.name, "steps": judge.steps or options.steps, **numbers(options)}
        result["rows"] = [row for row in before["rows"] if not about.items() <= row.items()] + result["rows"]
        result["command"] = "; ".join(dict.fromkeys([*before["command"].split("; "), result["command"]]))
    return write_result(result, path)


def draw(options: argparse.Namespace) -> None:
    """A picture of the rows that step caches have in the file `--out`: PSNR over the share of forwards."""
    (name,) = options.judge
    about = {"judge": name, **numbers(options)}
    rows = [row for row in json.loads(options.out.read_text(encoding="utf-8"))["rows"] if about.items() <= row.items()]
    full = max(row["forwards"] for row in rows)
    drawn = [
        row | {"name": row["name"].removeprefix(f"{name}: "), "ratio": full / row["forwards"]}
        for row in rows
        if row["forwards"] < full and "sparse" not in row["name"]
    ]
    title = f"{name}, {rows[0]['steps']} steps, {options.precision}: {full} forwards are 100 %"
    save_picture(draw_quality(drawn, title), options.draw)


def joined(one: Measured, other: Measured) -> Measured:
    """What was measured of other clips too."""
    for name, videos in other.comparisons.items():
        one.comparisons[name] += videos
        one.forwards[name] += other.forwards[name]
        one.seconds[name] += other.seconds[name]
    return one


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument(
        "--judge", action="append", choices=tuple(JUDGES), help="repeatable (default: the short embedded ones)"
    )
    made.add_argument("--setting", action="append", help="as of `quality`, repeatable (default: the words of speed)")
    made.add_argument("--draw", type=Path, help="only draw the rows of one --judge in the file --out, as PNG")
    made.add_argument("--testbed", type=Path, help="the folder that `tools.testbed` wrote")
    made.add_argument("--keep", type=Path, help="folder of full runs, made once (default: none is kept)")
    made.add_argument("--precision", default="fp32", help="of all runs (default %(default)s)")
    made.add_argument("--attention", default="auto", help="of all runs (default %(default)s)")
    made.add_argument("--rounded", action="store_true", help=f"also the full run in {ROUNDED}")
    made.add_argument("--out", type=Path, required=True, help="JSON file, or a folder")
    made.add_argument("--count", type=int, default=48, help="clips of each judge (default %(default)s)")
    made.add_argument("--batch", type=int, default=12, help="clips made at once (default %(default)s)")
    made.add_argument("--steps", type=int, default=20, help="default %(default)s")
    made.add_argument("--seed", type=int, default=6000)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--device", default="cpu", help="default %(default)s")
    return made


def measured_parts(judge: Judge, options: argparse.Namespace) -> Iterator[Measured]:
    """Every clip in full and in each setting, a batch at a time."""
    names = options.setting or [f"speed:{name}" for name in SPEEDS[1:]]
    material = testbed(judge, options) if judge.part else embedded(judge, options)
    base, samples = material.base, material.samples

    def load(**how: Any) -> Pipeline:
        return Pipeline.load(for_request(LoadOptions(device=options.device, **material.model, **how), base))

    pipe, pipes = load(**numbers(options)), {ROUNDED: load(precision=ROUNDED)} if options.rounded else {}
    settings = {FULL: None, **dict.fromkeys(pipes), **{name: parse_setting(name) for name in names}}
    about = {**material.about, **numbers(options)}
    with kept(options) as folder:  # the full run that warms up is used
        full_run = FullRuns(folder, about).run
        for some in batches_of(samples, options.batch):
            yield measure_quality(
                pipe, base, some, settings, len(some), pipes=pipes, full_run=full_run, judged=material.judged
            )


@dataclass(frozen=True)
class Material:
    """What a judge makes: options of its model, what all clips share, the clips, all that decides the full runs but
    precision and attention, and whether frames show a caption (None: as for the embedded model)."""

    model: dict[str, Any]
    base: Request
    samples: Sequence[Sample]
    about: dict[str, Any]
    judged: Callable[[Tensor, str], bool | None] = truth


def embedded(judge: Judge, options: argparse.Namespace) -> Material:
    width, height = judge.size
    how: dict[str, Any] = {"preset": f"{judge.steps}-step"} if judge.steps else {"steps": options.steps}
    how |= {} if judge.frames is None else {"frames": judge.frames}
    about = {"judge": judge.name, "steps": judge.steps or options.steps, "size": judge.size}
    samples = choose_samples(None, options.count, options.seed, tiny=True)
    base = Request(prompt="", width=width, height=height, **how)
    return Material({"model": "tiny", "task": judge.task}, base, samples, about)


def testbed(judge: Judge, options: argparse.Namespace) -> Material:
    """The test bed at one of the two sizes that it was trained on."""
    from tools.testbed.folders import SAMPLES
    from tools.testbed.full_runs import digest
    from tools.testbed.scenes import parse_world, shows_colours

    folder = options.testbed / judge.part
    width, height = judge.size
    sides = {"width": width, "height": height, "frames": judge.frames, "steps": options.steps}
    return Material(
        {"model": str(folder), "vae_precision": "fp32"},
        Request(prompt="", negative_prompt="", **sides),
        read_samples(folder / SAMPLES, options.count, options.seed),
        {**sides, "guidance_high": None, "guidance_low": None, "weights": digest(folder)},
        lambda frames, caption: shows_colours(frames, parse_world(caption)),
    )


def batches_of(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    for first in range(0, len(samples), size):
        yield samples[first : first + size]


@contextmanager
def kept(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of full runs."""
    with tempfile.TemporaryDirectory() as temporary:
        yield options.keep or Path(temporary)


def numbers(options: argparse.Namespace) -> dict[str, str]:
    """How all runs but the rounded one compute."""
    return {"precision": options.precision, "attention": options.attention}


def rows_of(judge: Judge, measured: Measured, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a judge, its full run first."""
    about = {
        "judge": judge.name,
        "size": measured.full["size"],
        "steps": judge.steps or options.steps,
        **numbers(options),
    }
    wanted = ("psnr", "psnr_se", "psnr_worst", "ssim", "truth", "motion", "look", "forwards", "saved")
    rows = []
    for row in measured.rows():
        word = row["name"].removeprefix("speed:")
        compared = {"psnr", "psnr_se", "psnr_worst", "ssim", "saved"} if word == FULL else ()
        kept = {key: row[key] for key in wanted if key in row and key not in compared}
        rows.append(
            {"name": f"{judge.name}: {word}", **about, "samples": row["samples"], "seconds": row["seconds"], **kept}
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
