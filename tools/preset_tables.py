"""Two tables of docs/quality.md. `bounds`: the errors that speed presets keep. `searched`: what searched ones keep.

Rows of `searched` come from the results of the techniques (embedded model, 240 captions) and of the test bed (48
clips). Seconds are the plan's answer for A14B at 1280x720x81 on an H200, as in the tables of the techniques.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tools.techniques import RUNS as TECHNIQUES
from tools.techniques import timed

RUNS = {  # techniques -> the test bed's result; the presets that are shown, None: all
    "techniques-t2v-40": ("testbed-t2v-h200", None),
    "techniques-i2v-40": ("testbed-i2v-h200", None),
    "techniques-i2v-20": (None, ("speed:balanced-i2v-20",)),  # it is for 20 steps
}
HEAD = (
    "| | forwards | s, estimate | embedded: dB | worst | captions true | test bed: dB | worst | colours right |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
)
Result = Mapping[str, Any]


def preset_table(newest: Callable[[str], Result], cell: Callable[[object], str]) -> list[str]:
    """The rows of each task, the full run first, then from the slowest on."""
    lines = list(HEAD)
    for techniques, (bed, shown) in RUNS.items():
        task, _, steps = TECHNIQUES[techniques]
        result = newest(f"{techniques}-x86_64-cpu")
        full_seconds, rows = timed(techniques, result["rows"])
        judged = {row["name"]: row for row in newest(bed)["rows"]} if bed else {}
        found = [(full_seconds, {"name": "full", "forwards": 2 * steps, "truth": result["full"]["truth"]})]
        found += [one for one in reversed(rows) if one[1]["name"].startswith("speed:")]
        for seconds, row in found:
            name = row["name"]
            if shown is not None and name not in ("full", *shown):
                continue
            other = judged.get(name, {})
            numbers = [float(row["forwards"]), seconds, *(row.get(key) for key in ("psnr", "psnr_worst", "truth"))]
            numbers += [other.get(key) for key in ("psnr", "psnr_worst", "colours")]
            label = f"`{name.replace('speed:', 'searched-')}`" if name != "full" else "full run"
            lines.append(f"| {task}: {label} | {' | '.join(map(cell, numbers))} |")
    return lines


def bounds_table() -> list[str]:
    """The errors that each preset allows, from its declaration."""
    from wan_core.sampling.speed_presets import BOUNDS

    lines = ["| `--speed` | error of each layer's attention | error of a forecast step |", "|---|---:|---:|"]
    for name, setting in BOUNDS.items():
        sparse, cache = (part.partition(":bound:")[2].partition(":")[0] for part in setting.split("+"))
        lines.append(f"| `{name}` | {sparse} | {cache} |")
    return lines
