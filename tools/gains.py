"""The README's table of what a user gains: rows of committed results, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.measured import FIRST_SEED, cell, find, newest_result

HEADER = {
    "en": "| what | before (s) | with WanCore (s) | times as fast | the video | measured |",
    "zh": "| 内容 | 之前（秒） | 用 WanCore（秒） | 倍数 | 视频 | 测量 |",
}
EXACT = ("the same but for rounding", "只差舍入")
BOTH = ("8-bit attention on both sides: INT8 before, FP8 after", "两边都是 8 位注意力：之前 INT8，之后 FP8")


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A row of the README: its text and what happens to the video, in both languages; the rows before and after."""

    text: tuple[str, str]
    video: tuple[str, str]
    before: str
    after: str
    result: str = "everyday-on-h200"


NATIVE, INT8 = f"{FIRST_SEED}native", f"{FIRST_SEED}native, comfy kitchen attention"
GUIDED = {"result": "everyday-off-h200", "before": "off: native, comfy kitchen attention"}
FRESH, CLICKED = "on, new prompt and picture: ", "native, accelerated, auto"
GAINS = (
    Gain(
        text=("four steps, **one click** in ComfyUI's workflow", "4 步，在 ComfyUI 的工作流中**点一下**"),
        video=EXACT,
        before=NATIVE,
        after=FIRST_SEED + CLICKED,
    ),
    Gain(
        text=("the same, with a new prompt and picture", "同上，用新的提示词和图片"),
        video=EXACT,
        result="everyday-fresh-h200",
        before=f"{FRESH}native",
        after=FRESH + CLICKED,
    ),
    Gain(
        text=("one click, files that ask for products in 16 bits", "点一下，要求 16 位乘法的文件"),
        video=EXACT,
        result="everyday-wide-h200",
        before=NATIVE,
        after=FIRST_SEED + CLICKED,
    ),
    Gain(
        text=("one click at 1280x720", "点一下，1280x720"),
        video=EXACT,
        result="everyday-on720-h200",
        before=NATIVE,
        after=FIRST_SEED + CLICKED,
    ),
    Gain(
        text=("four steps, WanCore's nodes", "4 步，WanCore 的节点"),
        video=EXACT,
        before=NATIVE,
        after=f"{FIRST_SEED}ours, auto",
    ),
    Gain(
        text=("four steps, one click, FP8 attention", "4 步，点一下，FP8 注意力"),
        video=BOTH,
        before=INT8,
        after=f"{FIRST_SEED}native, accelerated, cudnn-fp8",
    ),
    Gain(
        text=("four steps, WanCore's nodes, FP8 attention", "4 步，WanCore 的节点，FP8 注意力"),
        video=BOTH,
        before=INT8,
        after=f"{FIRST_SEED}ours, cudnn-fp8",
    ),
    Gain(
        text=(
            "the same workflow on two GPUs, **one command**; before: one GPU",
            "同一工作流用两块 GPU，**一个命令**；之前：一块 GPU",
        ),
        video=("exact attention against INT8", "精确注意力，对比 INT8"),
        result="two-gpus-on-h200",
        before=INT8,
        after=f"{FIRST_SEED}native, on all GPUs, 2 GPUs",
    ),
    Gain(
        text=(
            "20 guided steps, WanCore's nodes, FP8 attention; one run",
            "20 步带引导，WanCore 的节点，FP8 注意力；运行一次",
        ),
        video=BOTH,
        after="off: ours, cudnn-fp8",
        **GUIDED,
    ),
    Gain(
        text=("the same with `speed` `balanced`; one run", "同上，`speed` 为 `balanced`；运行一次"),
        video=(
            "6 of 40 forwards are forecast: [what that loses](docs/quality.md)",
            "40 次前向中有 6 次靠预测：[损失](docs/quality.md)",
        ),
        after="off: ours, balanced",
        **GUIDED,
    ),
    Gain(
        text=("the same with `speed` `fast`; one run", "同上，`speed` 为 `fast`；运行一次"),
        video=(
            "12 of 40 forwards are forecast: [what that loses](docs/quality.md)",
            "40 次前向中有 12 次靠预测：[损失](docs/quality.md)",
        ),
        after="off: ours, fast",
        **GUIDED,
    ),
)


def gains(results: Path, language: str) -> str:
    """What is exact comes first. Each row compares the seconds of two rows of one result."""
    number = list(HEADER).index(language)
    lines = [HEADER[language], "|---|---:|---:|---:|---|---|"]
    for gain in GAINS:
        result = newest_result(gain.result, results)
        before, after = (find(result["rows"], name, "gains") for name in (gain.before, gain.after))
        numbers = (cell(before["seconds"]), cell(after["seconds"]), f"{before['seconds'] / after['seconds']:.2f}")
        card = result["device"].removeprefix("NVIDIA ").partition(" ")[0]
        when = f"{card}, {result['date']}"
        lines.append("| " + " | ".join((gain.text[number], *numbers, gain.video[number], when)) + " |")
    return "\n".join([*lines, ""])
