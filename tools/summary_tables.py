"""The table of the README, `gains`, from the committed results: what is exact first, what changes the video last.

A row compares the seconds of two rows of one result: before and after, and says when and at which commit they were
measured, if not in this version. Where a job of the ladder has both rows, they are its. `gains.zh` is the same table in
Chinese.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]
HEADER = {
    "en": "| what | before (s) | with WanCore (s) | times as fast | the video | measured |",
    "zh": "| 内容 | 之前（秒） | 用 WanCore（秒） | 倍数 | 视频 | 测量 |",
}
EXACT = ("the same but for rounding", "只差舍入")
BOTH = ("8-bit attention on both sides: INT8 before, FP8 after", "两边都是 8 位注意力：之前 INT8，之后 FP8")
OURS = ("FP8 attention against exact attention", "FP8 注意力，对比精确注意力")
SPARSE = ("**changes**: a part of attention is not read", "**会变**：注意力只读一部分")
SEARCHED = ("**changes**: steps are skipped, too", "**会变**：还跳过一些步")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A row: its text and what happens to the video, in both languages; the result, and the names of its rows. size:
    where a result has several. ladder: the job of the ladder whose rows come first."""

    text: tuple[str, str]
    video: tuple[str, str]
    result: str = "everyday-h200"
    before: str
    after: str
    size: str | None = "640x640x81"
    ladder: str = ""


GAINS = (
    Compared(
        text=("four steps, **one node added** to ComfyUI's workflow", "4 步，在 ComfyUI 的工作流中**只加一个节点**"),
        video=EXACT,
        before="on, new seed: native",
        after="on, new seed: native, accelerated, auto",
        ladder="on-640-native",
    ),
    Compared(
        text=(
            "one run of the model in bf16 at 1280x720, before: diffusers, compiled",
            "模型运行一次，bf16，1280x720，之前：编译后的 diffusers",
        ),
        video=EXACT,
        result="single-h200",
        before="diffusers-compiled",
        after="+ flash4",
        ladder="forwards",
        size="1280x720x81",
    ),
    Compared(
        text=("four steps, WanCore's nodes, FP8 attention", "4 步，WanCore 的节点，FP8 注意力"),
        video=BOTH,
        before="on, new seed: native, comfy kitchen attention",
        after="on, new seed: ours, cudnn-fp8",
        ladder="on-640",
    ),
    Compared(
        text=(
            "20 guided steps; before: scaled from 2 steps; one run each",
            "20 步带引导；之前：由 2 步换算；各运行一次",
        ),
        video=BOTH,
        before="off: native, comfy kitchen attention",
        after="off: ours, cudnn-fp8",
    ),
    Compared(
        text=("the first video after a start, four steps", "启动后的第一个视频，4 步"),
        video=OURS,
        before="cold: native",
        after="cold: ours, cudnn-fp8",
    ),
    Compared(
        text=("four steps, and sparse attention `fast`", "4 步，再加稀疏注意力 `fast`"),
        video=SPARSE,
        before="on, new seed: native, comfy kitchen attention",
        after="on, new seed: ours, cudnn-fp8, sparse fast",
    ),
    Compared(
        text=(
            "20 guided steps, sparse attention and step cache `balanced`; before: scaled from 2 steps",
            "20 步带引导，稀疏注意力和步缓存 `balanced`；之前：由 2 步换算",
        ),
        video=SEARCHED,
        before="off: native, comfy kitchen attention",
        after="off: ours, cudnn-fp8, cache and sparse balanced",
    ),
)
TABLES = {"gains": GAINS}


def short_table(
    name: str,
    newest: Callable[[str], Result],
    cell: Callable[[object], str],
    measured: Callable[[Result, Result], Result],
) -> str | None:
    """The Markdown of the table called `name`, `gains.zh` for one; None for a name that is none of these. KeyError for
    a row that the newest result lacks. measured: of a row and its result, what says when, if that must be said."""
    kind, _, language = name.partition(".")
    language = language or "en"
    if kind not in TABLES or language not in HEADER:
        return None
    number = list(HEADER).index(language)
    lines = [HEADER[language], "|---|---:|---:|---:|---|---|"]
    for row in TABLES[kind]:
        result, before, after = both_rows(row, newest)
        numbers = (cell(before["seconds"]), cell(after["seconds"]), f"{before['seconds'] / after['seconds']:.2f}")
        when = "".join(measured(after, result).values())
        lines.append("| " + " | ".join((row.text[number], *numbers, row.video[number], when)) + " |")
    return "\n".join([*lines, ""])


def both_rows(row: Compared, newest: Callable[[str], Result]) -> tuple[Result, Result, Result]:
    """The result and both rows: of the ladder, if it has measured them."""
    with suppress(KeyError, ValueError):
        result = newest(row.ladder)
        return result, find(result["rows"], row.before, row.size), find(result["rows"], row.after, row.size)
    result = newest(row.result)
    return result, find(result["rows"], row.before, row.size), find(result["rows"], row.after, row.size)


def find(rows: Iterable[Result], name: str, size: str | None) -> Result:
    for row in rows:
        if row["name"] == name and size in (None, row.get("size")):
            return row
    raise KeyError(name)
