"""Parts of the README and docs that come from other tables of this repository: the address, files, what fits, presets.

`clone`: the line that installs the pack, with the public address of pyproject.toml once there is one. `your-card`: what
fits which card, and an estimate of its seconds; `forty-steps`: one of videos in 40 steps (both tools/estimates.py).
`cards`: the choice by card of `wan_core.pipeline.card_choice`. `files`: the files of the first video;
`models-SOURCE`: those of one source, both from wan_core/assets/models.json. A name that ends in `.zh` is the same in
Chinese.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tomllib

from tools.estimates import forty_steps, your_card
from tools.publish import PLACEHOLDER

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]

# ------------------------------------------------------------------------------------------------------------- address


def clone(_: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project["urls"]["Repository"]
    source = "." if f"/{PLACEHOLDER}/" in address else address  # `.`: a reader has this folder
    return ["```bash", f"git clone {source} /path/to/ComfyUI/custom_nodes/wancore", "```"]


# ---------------------------------------------------------------------------------------------------------------- files

LABELS = {  # tasks of a file -> what a reader calls them
    "t2v-A14B": ("text to video", "文生视频"),
    "i2v-A14B": ("image to video, first and last frame", "图生视频、首尾帧"),
    "i2v-14B-480P": ("Wan 2.1 image to video", "Wan 2.1 图生视频"),
    "ti2v-5B": ("5B", "5B"),
    "vace-14B": ("VACE", "VACE"),
    "fun-control-A14B": ("Fun control", "Fun 控制"),
    "camera-A14B": ("Fun camera", "Fun 相机"),
    "s2v-14B": ("sound to video", "声音生视频"),
    "animate-14B": ("Animate", "Animate"),
    "animate2-14B": ("Animate 2", "Animate 2"),
    "animate2-14B-distilled": ("Animate 2, few steps", "Animate 2，少步"),
}
ALL, NOT_5B = ("all", "全部"), ("all but 5B", "除 5B 外")
INPAINT = ("Fun inpaint", "Fun 局部重绘")
NOT_THERE = ("int8", "wan2.1_i2v")  # in the table of Comfy-Org's files
SOURCES: dict[str, Callable[[Row], bool]] = {
    "comfy": lambda row: row.get("choice") in (None, "inpaint") and not any(word in row["name"] for word in NOT_THERE),
    "steps": lambda row: row.get("choice") in ("four-steps", "lightx2v") and row["part"] != "lora",
    "svi": lambda row: row.get("choice") == "svi",
    "gguf": lambda row: row.get("choice") == "gguf",
    "int8": lambda row: "int8" in row["name"],
}
FIRST = ("i2v-A14B", ("high", "low", "text_encoder", "vae"))
HEADS = {"en": "| for | file | folder | GB |", "zh": "| 用途 | 文件 | 文件夹 | GB |"}


def rows() -> list[Row]:
    return json.loads((ROOT / "wan_core/assets/models.json").read_text(encoding="utf-8"))


def label(row: Row, number: int) -> str:
    if row.get("choice") == "inpaint":
        return INPAINT[number]
    tasks = set(row["tasks"])
    known = {task for one in rows() for task in one["tasks"]}
    if known - tasks <= {"ti2v-5B"}:
        return (NOT_5B if known - tasks else ALL)[number]
    return ", ".join(LABELS[task][number] for task in LABELS if task in tasks)


def link(row: Row) -> str:
    return f"[`{row['name']}`](https://huggingface.co/{row['repository']}/resolve/main/{row['path']})"


def pairs(found: Iterable[Row]) -> list[list[Row]]:
    """The files of a low-noise expert stand in the row of the high-noise expert's."""
    table: list[list[Row]] = []
    for row in found:
        follows = table and row["part"] in ("low", "lora_low", "svi_low") and row["tasks"] == table[-1][0]["tasks"]
        if follows and len(table[-1]) == 1:
            table[-1].append(row)
        else:
            table.append([row])
    return table


def file_table(found: Sequence[Row], language: str) -> list[str]:
    lines = [HEADS[language], "|---|---|---|---:|"]
    number = list(HEADS).index(language)
    for pair in pairs(found):
        first, size = pair[0], f"{pair[0]['gb']:g}"
        size = size if len(pair) == 1 else (f"{size} each", f"各 {size}")[number]
        names = ", ".join(map(link, pair))
        lines.append(f"| {label(first, number)} | {names} | `{first['folder']}` | {size} |")
    return lines


def files(language: str) -> list[str]:
    task, parts = FIRST
    found = [row for row in rows() if task in row["tasks"] and row["part"] in parts and "choice" not in row]
    return file_table(sorted(found, key=lambda row: parts.index(row["part"])), language)


# --------------------------------------------------------------------------------------------------- choice by card

EXAMPLES = (  # names, compute capability, GiB
    ("RTX 2080 Ti", (7, 5), 11),
    ("RTX 3060", (8, 6), 12),
    ("RTX 3090, A10", (8, 6), 24),
    ("A100", (8, 0), 80),
    ("RTX 4060 Ti, 4080", (8, 9), 16),
    ("RTX 4090, L4", (8, 9), 24),
    ("L40S, RTX 6000", (8, 9), 48),
    ("H100", (9, 0), 80),
    ("H200", (9, 0), 141),
    ("B200", (10, 0), 180),
    ("RTX 5080", (12, 0), 16),
    ("RTX 5090", (12, 0), 32),
)


def cards_table(_: str = "") -> list[str]:
    """The choice for cards as people have them, all optional libraries there."""
    from wan_core.ops.cards import AMPERE, card_of
    from wan_core.pipeline.card_choice import card_choices

    lines = ["| card | GiB | precision | attention `auto` | `fast` | residency |", "|---|---:|---|---|---|---|"]
    for names, capability, gib in EXAMPLES:
        card = card_of(capability)
        found = card_choices(capability, gib, lambda kind, _, c=capability: kind != "kernels" or c >= AMPERE)
        precision, attention, residency = (one.value for one in found[:3])
        exact = attention.removeprefix("auto (").removesuffix(")")
        lines.append(
            f"| {card.name}: {names} | {gib} | `{precision}` | `{exact}` | `{card.rounding[0]}` | {residency} |"
        )
    return lines


REPORTS = ROOT / "reports"
OWN_CARD = "| H100 80GB HBM3 (ours, **random weights**) | i2v-A14B, 640x640, 81 frames, 4 steps | full | {} | | | "


def owners(_: str) -> list[str]:
    """The report cards that owners sent, and our own row."""
    from tools.estimates import MEASURED, OURS, RESULTS
    from tools.measured import find, newest_result

    result = newest_result(MEASURED, RESULTS)
    lines = ["| card | video | setting | seconds | PSNR dB | SSIM | machine |", "|---|---|---|---:|---:|---:|---|"]
    libraries = ", ".join(f"{name} {version}" for name, version in list(result["versions"].items())[:3])
    lines.append(OWN_CARD.format(find(result["rows"], OURS, "owners")["seconds"]) + libraries + " |")
    for file in sorted(REPORTS.glob("*.json")):
        card = json.loads(file.read_text(encoding="utf-8"))
        for row in card["rows"]:
            cells = (row.get(name, "") for name in ("setting", "s a video", "PSNR dB", "SSIM"))
            lines.append(f"| {card['card']} | {card['video']} | {' | '.join(cells)} | {'; '.join(card['machine'])} |")
    return lines


PARTS: dict[str, Callable[[str], list[str]]] = {
    "cards": cards_table,
    "clone": clone,
    "files": files,
    "forty-steps": forty_steps,
    "owners": owners,
    "your-card": your_card,
}


def readme_part(name: str) -> str | None:
    """The Markdown of the part of this name; None for a name that is none of these."""
    kind, _, language = name.partition(".")
    source = SOURCES.get(kind.removeprefix("models-"))
    if kind.startswith("models-") and source is not None:
        return "\n".join([*file_table([row for row in rows() if source(row)], language or "en"), ""])
    return "\n".join([*PARTS[kind](language or "en"), ""]) if kind in PARTS else None
