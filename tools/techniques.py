"""Single techniques and presets on the embedded model: their loss, beside the seconds of a video of A14B.

Results `benchmarks/results/techniques-TASK-STEPS-*.json` are rows of `python -m wan_core quality`. What is saved is the
plan's answer for A14B at 1280x720x81 in FP8 on one H200, where attention has the share of the time that it has in real
videos; the embedded model's own seconds say nothing about that. Rows of settings that were removed since stay in the
files and are in no table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RUNS = {  # result -> what it is called, task of A14B, steps
    "techniques-t2v-40": ("text to video, 40 steps", "t2v-A14B", 40),
    "techniques-i2v-40": ("image to video, 40 steps", "i2v-A14B", 40),
    "techniques-t2v-20": ("text to video, 20 steps", "t2v-A14B", 20),
    "techniques-i2v-20": ("image to video, 20 steps", "i2v-A14B", 20),
}
# Of a dense forward of A14B at 1280x720x81 in FP8 on one H200, and of all but the forwards of a video
# (benchmarks/results/sparse-videos-h200-20261123.json).
FORWARD, OTHERS = 7.545, 2.06
LATENTS = (21, 90, 160)
COLUMNS = {
    "psnr": "dB",
    "psnr_se": "±",
    "psnr_worst": "worst dB",
    "ssim": "SSIM",
    "flicker": "flicker",
    "truth": "captions true",
    "truth_se": "± ",
}


def seconds(task: str, steps: int, setting: str, forwards: float) -> float:
    """A whole video of that many forwards, each as long as those of A14B's plan in the mean."""
    from wan_core.models.wan.families import find_task
    from wan_core.sampling.cache.arguments import parse_setting
    from wan_core.sampling.cache.skipping import skip_forwards
    from wan_core.sampling.plan import make_plan
    from wan_core.sampling.sparsity.schedule import with_costs

    plan, config = make_plan(task=task, steps=steps), find_task(task).full_size
    assert config is not None
    plan = with_costs(skip_forwards(plan, parse_setting(setting), None, None), config, LATENTS)
    denoising = plan.estimate({"high": FORWARD, "low": FORWARD}) or 0.0
    return forwards / plan.forwards * denoising + OTHERS


def exists(setting: str) -> bool:
    """Whether this version has a setting of a result. Its speed presets are others than those that were measured."""
    from wan_core.config import OptionError
    from wan_core.sampling.cache.arguments import parse_setting

    try:
        parse_setting(setting)
    except OptionError:
        return False
    return not setting.startswith("speed:")


def timed(result: str, rows: Sequence[Mapping[str, Any]]) -> tuple[float, list[tuple[float, Mapping[str, Any]]]]:
    """Seconds of the full run, and the rows with theirs, the fastest first."""
    _, task, steps = RUNS[result]
    rows = [row for row in rows if exists(row["name"])]
    timed_rows = [(round(seconds(task, steps, row["name"], row["forwards"]), 1), row) for row in rows]
    full = round(seconds(task, steps, "full", 2 * steps), 1)
    return full, sorted(timed_rows, key=lambda one: (one[0], -one[1]["psnr"]))


def best(timed_rows: Sequence[tuple[float, Mapping[str, Any]]]) -> set[str]:
    """The names of the rows that no faster row equals."""
    from wan_lab.compare import pareto

    return set(pareto({row["name"]: (-seconds, row["psnr"]) for seconds, row in timed_rows}))


def technique_table(name: str, result: Mapping[str, Any]) -> list[str]:
    """The lines of the table of a result; those in bold are the best in their seconds."""
    full, timed_rows = timed(name, result["rows"])
    front = best(timed_rows)
    lines = ["| | 720p s | saved | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---:|" * (2 + len(COLUMNS))]
    for taken, row in timed_rows:
        setting = f"**`{row['name']}`**" if row["name"] in front else f"`{row['name']}`"
        numbers = [f"{taken:.0f}", f"{1 - taken / full:.2f}", *(f"{row[key]:.4g}" for key in COLUMNS)]
        lines.append(f"| {setting} | " + " | ".join(numbers) + " |")
    return lines
