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
COLUMNS = {
    "psnr": "dB",
    "psnr_se": "±",
    "psnr_worst": "worst dB",
    "ssim": "SSIM",
    "flicker": "flicker",
    "truth": "captions true",
    "truth_se": "± ",
}


def seconds(name: str, steps: int, setting: str, forwards: float) -> float:
    """A whole video of that many forwards, each as long as those of A14B's plan in the mean."""
    from wan_core.models.wan.families import find_task
    from wan_core.sampling.cache.arguments import parse_setting
    from wan_core.sampling.cache.skipping import skip_forwards
    from wan_core.sampling.plan import make_plan
    from wan_lab import search_run

    plan = skip_forwards(make_plan(task=name, steps=steps), parse_setting(as_called_now(setting)), None, None)
    size = search_run.full_size(find_task(name), search_run.H200_SIZE)
    denoising = search_run.estimated_seconds(plan, *size, search_run.H200_FORWARD, 0.0)
    return forwards / plan.forwards * denoising + search_run.H200_BESIDE


def as_called_now(setting: str) -> str:
    """What presets are called since they were measured."""
    return setting.replace("speed:", "speed:searched-")


def exists(setting: str) -> bool:
    """Whether this version has a setting of a result."""
    from wan_core.config import OptionError
    from wan_core.sampling.cache.arguments import parse_setting

    try:
        parse_setting(as_called_now(setting))
    except OptionError:
        return False
    return True


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
