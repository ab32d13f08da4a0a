"""Check that the figures in the prose of README.md, README.zh.md and docs/*.md are those of committed results.

    python tools/figures.py     exit 1, naming page, line and figure, if one is in no result

A figure is a number with a unit: s, ms, dB, GiB, GB/s, TFLOP/s or times. It must be in the results that its paragraph
names, as it is rounded, or in any if that names none. `times` may be the ratio of two rows, `dB better` their
difference. Left out are code, tables, sentences that say that their figures are estimated, planned or were read once,
docs/log.md, and LEFT.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r"TFLOP/s|GB/s|GiB|dB|ms|s|seconds|times|秒|倍"
FIGURES = re.compile(
    rf"(?<![\w.,^*-])({NUMBER}(?:(?:, | and | to | or | 和 | 到 ){NUMBER})*)[ -]?(?P<unit>{UNIT})(?![\w/])"
)
MARKED = re.compile(
    r"\bestimat|\bplans?\b|\bplanned\b|\(read\)|\bread once\b|\bpredict|\bcalculat|\btimeout|估|计划", re.IGNORECASE
)
SKIPPED = re.compile(r"```.*?```|<!-- bench:.*?<!-- /bench -->|^\|[^\n]*|^#[^\n]*", re.DOTALL | re.MULTILINE)
SENTENCE, SPAN = re.compile(r"(?<=[.:;!?。：；])\s+"), re.compile(r"`[^`]*`")
COMPARED = re.compile(r"\s(better|worse|less|more)\b")  # after dB: a difference of two rows
NAMES = {"seconds": "s", "秒": "s", "倍": "times"}
SCALES = {"s": (1.0, 1e3), "ms": (1.0, 1e-3), "GiB": (1.0, 2.0**30)}  # results hold seconds or ms, GiB or bytes
TIME = "second|_s$|_ms$|^ms$|time|load|spread|text|image|sampl|decode|save|import|library|forward|read"
KEYS = {  # unit -> the keys whose numbers may have it
    "s": TIME,
    "ms": TIME,
    "dB": "psnr|db|worst",
    "GiB": "gib|bytes|memory|peak",
    "TFLOP/s": "tflop",
    "GB/s": "gb_s",
    "times": "ratio|times|slowdown|speed",
}
LEFT = {  # page -> figures that were read once, are limits, or follow from others by an arithmetic that the page says
    "docs/benchmarks.md": "27.8 GiB, 250 s, 5.6 dB",
    "docs/families.md": "25 GiB, 58 GiB, 80 GiB",
    "docs/parallel.md": "1.27 s, 0.87 s, 1.18 s, 2.69 s, 12.9 GB/s, 33 GB/s",
    "README.md": "12 GiB, 24 GiB",
    "README.zh.md": "12 GiB, 24 GiB",
    "docs/cards.md": "12 GiB, 16 GiB, 24 GiB, 0.6 GiB, 55 GB/s, 250 ms, 190 ms",
    "docs/performance.md": "288 ms, 669 TFLOP/s, 790 TFLOP/s",
    "docs/precision.md": "3.1 s",
    "docs/quality.md": "2.1 s, 100 s, 65 s, 98 s, 64 s, 28.2 dB, 63 s, 0.43 s, 7 dB, 11 dB",
    "docs/sparse.md": "145 ms, 33.7 dB, 34.2 dB, 1.5 ms, 4.24 s, 0.43 s, 0.41 s",
    "docs/startup.md": "24.5 GB/s, 26.8 GB/s, 33 GB/s, 19.7 s, 8.9 s, 1.1 s",
}


def results(root: Path) -> dict[str, Any]:
    """Stem -> content of each committed result, those of the archive too."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((root / RESULTS).rglob("*.json"))}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """(key, number) of every number in a result."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, abs(float(value))


def numbers_of(result: Any) -> dict[str, list[float]]:
    """The numbers of one result by the units that their keys may have, rising, with ratios and differences."""
    found = list(leaves(result))
    numbers = {unit: {one for key, one in found if re.search(keys, key, re.I)} for unit, keys in KEYS.items()}
    seconds = [one for one in numbers["s"] if one]
    numbers["times"] |= {after / before for after in seconds for before in seconds if after >= before}
    numbers["dB better"] = {high - low for low in numbers["dB"] for high in numbers["dB"] if high > low}
    return {unit: sorted(values) for unit, values in numbers.items()}


def has(numbers: Mapping[str, list[float]], unit: str, figure: str) -> bool:
    """Whether one of the numbers is the figure, as that is rounded."""
    value, half = float(figure.replace(",", "")), 0.5000001 * 10.0 ** -len(figure.partition(".")[2])
    for scale in SCALES.get(unit, (1.0,)):
        place = bisect_left(numbers[unit], (value - half) * scale)
        if place < len(numbers[unit]) and numbers[unit][place] <= (value + half) * scale:
            return True
    return False


def is_named(stem: str, span: str) -> bool:
    """Whether a span of code is the name of a result: its file, without date, or without device."""
    name = span.strip("`").removeprefix(f"{RESULTS}/").removeprefix("archive/").removesuffix(".json")
    return "-" in name and (fnmatch(stem, name) or stem.startswith(f"{name}-"))


def figures_in(text: str) -> Iterator[tuple[int, str, str, str]]:
    """(line, paragraph, number, unit) of each figure of a page, but for sentences that are marked."""
    blank = SKIPPED.sub(lambda match: "\n" * match[0].count("\n"), text)
    at = 0
    for paragraph in re.split(r"(\n(?=[ \t]*\n|[ \t]*- ))", blank):
        inside = 0
        for sentence in SENTENCE.split(paragraph):
            inside = paragraph.index(sentence, inside)
            if not MARKED.search(sentence):
                plain = SPAN.sub(lambda match: " " * len(match[0]), sentence)
                for match in FIGURES.finditer(plain):
                    unit = NAMES.get(match["unit"], match["unit"])
                    unit = "dB better" if COMPARED.match(plain, match.end()) else unit
                    line = 1 + blank.count("\n", 0, at + inside + match.start())
                    yield from ((line, paragraph, number, unit) for number in re.findall(NUMBER, match[1]))
            inside += len(sentence)
        at += len(paragraph)


def faults(root: Path) -> Iterator[str]:
    all_results = results(root)
    numbers = functools.cache(lambda stem: numbers_of(all_results[stem]))
    for path in [root / "README.md", root / "README.zh.md", *sorted((root / "docs").glob("*.md"))]:
        page = str(path.relative_to(root))
        if page == "docs/log.md":
            continue
        for line, paragraph, number, unit in figures_in(path.read_text(encoding="utf-8")):
            named = [stem for stem in all_results if any(is_named(stem, span) for span in SPAN.findall(paragraph))]
            shown = f"{number} {unit.removesuffix(' better')}"
            left = shown in LEFT.get(page, "").split(", ")
            if not left and not any(has(numbers(stem), unit, number) for stem in named or all_results):
                yield f"{page}:{line}: {shown} is not in {', '.join(named) or 'any result'}"


def main() -> int:
    messages = list(faults(ROOT))
    print("\n".join(messages) or "every figure is in a result, or marked")
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
