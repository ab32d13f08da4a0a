"""The two short tables of the README, `why` and `summary`, from the committed results.

A row compares the seconds of two rows of one result: before and after. Where the row before is missing, the
result's own `ratio` says how much longer it takes. `why.zh` and `summary.zh` are the same tables in Chinese.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]
HEADER = {
    "en": "| what | without (s) | with WanCore (s) | speed-up |",
    "zh": "| 内容 | 不用（秒） | 用 WanCore（秒） | 加速比 |",
}
LARGE, SMALL = "1280x720x81", "832x480x81"
PRESET = "speed:balanced, fp8 + cudnn-fp8: total"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A row: its text in both languages, the result, and the names of its rows. size: where a result has several."""

    en: str
    zh: str
    result: str
    after: str
    before: str | None = None
    size: str | None = None


WHY = (
    Compared(
        en="ComfyUI's image-to-video template, 640x640, 81 frames, four-step LoRAs: from the click to the saved file",
        zh="ComfyUI 的图生视频模板，640x640，81 帧，4 步 LoRA：从点击到保存文件",
        result="everyday-h200",
        before="on, new seed: native, comfy kitchen attention",
        after="on, new seed: ours, cudnn-fp8, sparse fast",
    ),
    Compared(
        en="ComfyUI's own model and sampler, 720p, 40 guided steps, 8 of 40 blocks: one node added, WanCore Accelerate",
        zh="ComfyUI 自己的模型和采样器，720p，40 步带引导，40 块中的 8 块：只加一个节点 WanCore 加速",
        result="native-h200",
        before="40 guided steps: native",
        after="40 guided steps: accelerated, cudnn-fp8, cache and sparse balanced",
    ),
    Compared(
        en="Text to video, 720p, 81 frames, 40 steps, `--speed balanced`: the video, against ComfyUI's forwards alone",
        zh="文生视频，720p，81 帧，40 步，`--speed balanced`：整个视频，对比 ComfyUI 单独的前向时间",
        result="sparse-videos-h200",
        after=PRESET,
        size=LARGE,
    ),
)
SUMMARY = (
    Compared(
        en="one forward, 720p, bf16, results equal but for rounding, over compiled diffusers",
        zh="一次前向，720p，bf16，结果只差舍入，对比编译后的 diffusers",
        result="single-h200",
        before="diffusers-compiled",
        after="+ flash4",
        size=LARGE,
    ),
    Compared(
        en="the same in FP8, attention too",
        zh="同上，FP8，注意力也是",
        result="single-h200",
        before="diffusers-compiled",
        after="fp8 + cudnn-fp8",
        size=LARGE,
    ),
    Compared(
        en="the same with a quarter of the attention (`--sparse`)",
        zh="同上，只算四分之一的注意力（`--sparse`）",
        result="sparse-forward-h200",
        before="diffusers-compiled",
        after="fp8 + sparse 25 %",
        size=LARGE,
    ),
    Compared(
        en="image to video 640x640, 20 guided steps, over ComfyUI (scaled from 2 steps), nothing skipped",
        zh="图生视频 640x640，20 步带引导，对比 ComfyUI（由 2 步换算），不跳过任何步",
        result="everyday-h200",
        before="off: native, comfy kitchen attention",
        after="off: ours, cudnn-fp8",
    ),
    Compared(
        en="four steps, 480p, 81 frames, FP8 attention: the whole video",
        zh="4 步，480p，81 帧，FP8 注意力：整个视频",
        result="four-step",
        after="total",
    ),
    Compared(
        en="four steps, 720p, 81 frames, FP8 attention: the whole video",
        zh="4 步，720p，81 帧，FP8 注意力：整个视频",
        result="sparse-videos-h200",
        after="full@4, fp8 + cudnn-fp8: total",
        size=LARGE,
    ),
    Compared(
        en="four GPUs, one forward, 720p, over diffusers on the same four",
        zh="4 块 GPU，一次前向，720p，对比同样 4 块 GPU 上的 diffusers",
        result="parallel-h200",
        before="diffusers, ulysses 4",
        after="fp8 + cudnn-fp8, ulysses 4",
        size=LARGE,
    ),
    Compared(
        en="a card of 16 GiB (emulated), one forward, 720p, FP8, over everything resident",
        zh="16 GiB 显存（模拟），一次前向，720p，FP8，对比全部常驻",
        result="streaming-h200",
        before="fp8, resident",
        after="fp8, 16 GiB",
        size=LARGE,
    ),
)
TABLES = {"why": WHY, "summary": SUMMARY}


def short_table(name: str, newest: Callable[[str], Result], cell: Callable[[object], str]) -> str | None:
    """The Markdown of the table called `name`, `why.zh` for one; None for a name that is none of these. KeyError for a
    row that the newest result lacks."""
    kind, _, language = name.partition(".")
    language = language or "en"
    if kind not in TABLES or language not in HEADER:
        return None
    lines = [HEADER[language], "|---|---:|---:|---:|"]
    for row in TABLES[kind]:
        rows = newest(row.result)["rows"]
        after = find(rows, row.after, row.size)
        ratio = (
            after.get("ratio") if row.before is None else find(rows, row.before, row.size)["seconds"] / after["seconds"]
        )
        before = None if ratio is None else after["seconds"] * ratio
        cells = (cell(before), cell(after["seconds"]), "" if ratio is None else f"{ratio:.2f}")
        lines.append(f"| {getattr(row, language)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def find(rows: Iterable[Result], name: str, size: str | None) -> Result:
    for row in rows:
        if row["name"] == name and size in (None, row.get("size")):
            return row
    raise KeyError(name)
