"""Check that the figures in the prose of README.md, README.zh.md and docs/*.md are those of committed results.

    python tools/figures.py     exit 1, naming page, line and figure, if one is in no result

A figure is a number with a unit: s, ms, dB, GiB, GB/s, TFLOP/s or times. It must be in the results that its paragraph
names, as it is rounded, or in any if that names none. `times` may be the ratio of two rows, `dB better` their
difference. In a table that was written by hand, every number with a decimal point beside the first column must be in
the results that its chapter names. Left out are code, sentences that say that their figures are estimated, planned or
were read once, pages of PAGES_LEFT, EXCEPTIONS and TABLES_LEFT, each with its reason. Tables between
`<!-- bench:NAME -->` marks: tools/readme_tables.py.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PLOTS = "benchmarks/results", "docs/images/plots.json"  # the second holds what the plots show of the first

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r"TFLOP/s|GB/s|GiB|dB|ms|s|seconds|times|秒|倍"
FIGURES = re.compile(
    rf"(?<![\w.,^*-])({NUMBER}(?:(?:, | and | to | or | 和 | 到 ){NUMBER})*)[ -]?(?P<unit>{UNIT})(?![\w/])"
)
MARKED = re.compile(
    r"\bestimat|\bplans?\b|\bplanned\b|\(read\)|\bread once\b|\bpredict|\bcalculat|\btimeout|估|计划",
    re.IGNORECASE,
)
SKIPPED = re.compile(r"```.*?```|<!-- bench:.*?<!-- /bench -->|^\|[^\n]*|^#[^\n]*", re.DOTALL | re.MULTILINE)
MADE = re.compile(r"```.*?```|<!-- bench:.*?<!-- /bench -->", re.DOTALL)  # code, and tables that are made
TABLE = re.compile(r"^\|.*\n\|[-:| ]+\|\n(?P<rows>(?:\|.*\n?)+)", re.MULTILINE)
DECIMAL = re.compile(r"(?<![\w./:-])\d+\.\d+(?![\w./:]| %)")  # a share with its sign is a setting
CELL_SCALES = (1.0, 1e-2, 1e2, 1e-3, 1e3)  # as it is, a share in per cent, seconds in ms
SENTENCE = re.compile(r"(?<=[.:;!?。：；])\s+")
SPAN = re.compile(r"`[^`]*`")
COMPARED = re.compile(r"\s(better|worse|less|more)\b")  # after dB: a difference of two rows
NAMES = {"seconds": "s", "秒": "s", "倍": "times"}
SCALES = {"s": (1.0, 1e3), "ms": (1.0, 1e-3), "GiB": (1.0, 2.0**30)}  # results hold seconds or ms, GiB or bytes
TIME = re.compile(
    "second|_s$|_ms$|^ms$|time|load|spread|text|image|sampl|decode|save|import|library|forward|read", re.IGNORECASE
)
KEYS = {  # unit -> the keys whose numbers may have it
    "s": TIME,
    "ms": TIME,
    "dB": re.compile("psnr|db|worst", re.IGNORECASE),
    "GiB": re.compile("gib|bytes|memory|peak", re.IGNORECASE),
    "TFLOP/s": re.compile("tflop", re.IGNORECASE),
    "GB/s": re.compile("gb_s", re.IGNORECASE),
    "times": re.compile("ratio|times|slowdown|speed", re.IGNORECASE),
}

PAGES_LEFT = {"docs/log.md": "a log: what was read on the day"}
READ = "read once, before results held it"
LIMIT = "the memory of a card"
BYTES = "bytes of the files over seconds of the result"
EXCEPTIONS: dict[str, dict[str, str]] = {  # page -> figure as written -> why it is in no result
    "docs/benchmarks.md": {
        "27.8 GiB": "from the message of a run that ended without memory (left_out of everyday-two-h200)",
        "250 s": "a limit of the search",
        "5.6 dB": "a difference of two rows of the table",
    },
    "docs/families.md": {"25 GiB": "tokens times bytes", "58 GiB": "tokens times bytes", "80 GiB": "a power of two"},
    "docs/parallel.md": {
        **dict.fromkeys(("1.27 s", "0.87 s", "1.18 s", "2.69 s"), READ),
        "12.9 GB/s": "the border between two meshes, from the times of the table",
        "33 GB/s": BYTES,
    },
    **dict.fromkeys(("README.md", "README.zh.md"), dict.fromkeys(("12 GiB", "24 GiB"), LIMIT)),
    "docs/cards.md": {
        **dict.fromkeys(("12 GiB", "16 GiB", "24 GiB"), LIMIT),
        "0.6 GiB": "a setting",
        "55 GB/s": READ,
        "250 ms": "a forward of single-h200 over 40 blocks",
        "190 ms": "a forward of single-h200 over 40 blocks",
    },
    "docs/performance.md": {"288 ms": READ, "669 TFLOP/s": READ, "790 TFLOP/s": READ},
    "docs/precision.md": {"3.1 s": "by one thread, before files were read by several"},
    "docs/quality.md": {
        "2.1 s": "text and decoding together: 0.01 and 2.03 s",
        "100 s": "a limit of the search",
        "65 s": "a limit of the search",
        "98 s": "in the file of the preset",
        "64 s": "in the file of the preset",
        "28.2 dB": "of a preset that was replaced",
        "63 s": "of a preset that was replaced",
        "0.43 s": "a difference of two rows of sparse-slope-h200",
        "7 dB": "a difference of two rows of the test bed",
        "11 dB": "a difference of two rows of the test bed",
    },
    "docs/sparse.md": {
        "145 ms": READ,
        "33.7 dB": READ,
        "34.2 dB": READ,
        "1.5 ms": "the slope of the table above",
        "4.24 s": "two forwards of each expert: 8.494 and 8.458 s",
        "0.43 s": "a difference of two rows",
        "0.41 s": "40 layers of the table above",
    },
    "docs/startup.md": {
        **dict.fromkeys(("24.5 GB/s", "26.8 GB/s", "33 GB/s"), BYTES),
        "19.7 s": READ,
        "8.9 s": "of startup-h200",
        "1.1 s": READ,
    },
    "docs/testbed.md": {
        "842 s": "of the training",
        "0.1 dB": "a difference of two rows of the table",
        "9 dB": "a difference of two rows of the table",
        "400 s": "of the training",
        "5.4 dB": "a difference of two rows of the table",
        "6.1 dB": "a difference of two rows of the table",
    },
}


TABLES_LEFT: dict[str, dict[str, str]] = {  # page -> the first words of a table's first row that has some -> why
    "docs/parallel.md": {
        "`1x1x2`": "the estimate of a mesh",
        "1 GPU": "ratios of rows of parallel-steps-h200, and the estimate of a mesh",
        "1": "expected, not measured: the estimate of a mesh",
    },
    "docs/precision.md": {"FP8 by rows": READ},
    "docs/resolution.md": {"`0.5/0.95-0.99`": READ},
    "docs/sparse.md": {"25 %": READ},
    "docs/testbed.md": {"trained, fp16": "sizes of files", "text: full": "a standard error of six clips, from twelve"},
}


@dataclass(frozen=True)
class Figure:
    page: str
    line: int
    text: str
    value: float
    digits: int
    unit: str


def results(root: Path) -> dict[str, Any]:
    """Stem -> content of each committed result."""
    files = sorted((root / RESULTS).rglob("*.json"))  # those of the archive, which no table reads, too
    plotted = json.loads((root / PLOTS).read_text(encoding="utf-8"))["quality.png"]
    points = [{"seconds": point[0], "psnr": point[1]} for points in plotted.values() for point in points]
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files} | {"plots": points}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """(key, number) of every number in a result; numbers in texts (messages, commands) count as well."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, float(value)


class Values:
    """The numbers of one result by the units that their keys may have, and the ratios of seconds."""

    def __init__(self, result: Any) -> None:
        numbers = [(key, abs(number)) for key, number in leaves(result)]
        self.numbers = {
            unit: sorted({number for key, number in numbers if keys.search(key)}) for unit, keys in KEYS.items()
        }
        seconds = [number for number in self.numbers["s"] if number]
        self.numbers["times"] += [after / before for after in seconds for before in seconds if after >= before]
        self.numbers["times"].sort()
        psnr = self.numbers["dB"]
        self.numbers["dB better"] = sorted({high - low for low in psnr for high in psnr if high > low})

    def has(self, figure: Figure) -> bool:
        half = 0.5000001 * 10.0**-figure.digits
        scales = SCALES.get(figure.unit, (1.0,))
        return any(near(self.numbers[figure.unit], figure.value * scale, half * scale) for scale in scales)


def near(numbers: list[float], value: float, half: float) -> bool:
    place = bisect_left(numbers, value - half)
    return place < len(numbers) and numbers[place] <= value + half


def is_named(stem: str, span: str) -> bool:
    """Whether a span of code is the name of a result: its file, without date, or without device."""
    name = span.strip("`").removeprefix(f"{RESULTS}/").removeprefix("archive/").removesuffix(".json")
    return "-" in name and (fnmatch(stem, name) or stem.startswith(f"{name}-"))


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph of prose; what is skipped is left as empty lines."""
    blank = SKIPPED.sub(lambda match: "\n" * match[0].count("\n"), text)
    line = 1
    for block in re.split(r"(\n(?=[ \t]*\n|[ \t]*- ))", blank):
        if block.strip():
            yield line, block
        line += block.count("\n")


def figures_in(page: str, line: int, paragraph: str) -> Iterator[Figure]:
    """The figures of the sentences that are not marked."""
    at = 0
    for sentence in SENTENCE.split(paragraph):
        start = paragraph.index(sentence, at)
        at = start + len(sentence)
        if MARKED.search(sentence):
            continue
        plain = SPAN.sub(lambda match: " " * len(match[0]), sentence)
        for match in FIGURES.finditer(plain):
            here = line + paragraph.count("\n", 0, start + match.start())
            for number in re.findall(NUMBER, match[1]):
                digits = len(number.partition(".")[2])
                unit = match["unit"]
                kind = "dB better" if COMPARED.match(plain, match.end()) else NAMES.get(unit, unit)
                yield Figure(page, here, f"{number} {unit}", float(number.replace(",", "")), digits, kind)


def tables(text: str) -> Iterator[tuple[int, str, list[str], list[str]]]:
    """(line, first cell, spans of code of its chapter up to there, numbers) of each table that was written by hand."""
    plain = MADE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in TABLE.finditer(plain):
        before = plain[: match.start()]
        cells = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in match["rows"].splitlines()]
        numbers = [number for row in cells for cell in row[1:] for number in DECIMAL.findall(SPAN.sub("", cell))]
        chapter = before[max(before.rfind("\n## "), before.rfind("\n### "), 0) :]
        yield before.count("\n") + 1, cells[0][0], SPAN.findall(chapter), numbers


def table_faults(page: str, text: str, all_results: Mapping[str, Any]) -> Iterator[str]:
    for line, first, spans, numbers in tables(text):
        if any(first.startswith(beginning) for beginning in TABLES_LEFT.get(page, ())):
            continue
        named = [stem for stem in all_results if any(is_named(stem, span) for span in spans)]
        cell_numbers = sorted({abs(number) for stem in named or all_results for _, number in leaves(all_results[stem])})
        for number in numbers:
            half = 0.5000001 * 10.0 ** -len(number.partition(".")[2])
            if not any(near(cell_numbers, float(number) * scale, half * scale) for scale in CELL_SCALES):
                yield f"{page}:{line}: {number} in the table of {first!r} is not in {', '.join(named) or 'any result'}"


def faults(root: Path) -> Iterator[str]:
    all_results = results(root)
    values = functools.cache(lambda stem: Values(all_results[stem]))
    for path in [root / "README.md", root / "README.zh.md", *sorted((root / "docs").glob("*.md"))]:
        page = str(path.relative_to(root))
        if page in PAGES_LEFT:
            continue
        text = path.read_text(encoding="utf-8")
        yield from table_faults(page, text, all_results)
        for line, paragraph in paragraphs(text):
            named = [stem for stem in all_results if any(is_named(stem, span) for span in SPAN.findall(paragraph))]
            for figure in figures_in(page, line, paragraph):
                if figure.text not in EXCEPTIONS.get(page, ()) and not any(
                    values(stem).has(figure) for stem in named or all_results
                ):
                    where = ", ".join(named) if named else "any result"
                    yield f"{page}:{figure.line}: {figure.text} is not in {where}"


def main() -> int:
    messages = list(faults(ROOT))
    print("\n".join(messages) or "every figure is in a result, or marked")
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
