"""Write the benchmark tables of the README and docs/ from the committed results, so that no number is typed by hand.

    python tools/readme_tables.py            rewrite README.md, README.zh.md and docs/*.md
    python tools/readme_tables.py --check    exit 1, naming pages and tables, if one does not show the newest results

A table stands between `<!-- bench:NAME -->` and `<!-- /bench -->`. NAME is a suite (`forward`), or a suite and a device
(`forward-h200`) where the suite was measured on several. Its newest file is shown, which is called
`benchmarks/results/<suite>-<device>-<yyyymmdd>.json` and holds
{"suite", "command", "commit", "device", "versions": {library: version}, "rows": [{"name", "seconds", ...}]}.
Rows that were not measured by this version of the project say their date and commit. Results in `archive` are for the
figures of the prose (tools/figures.py); no table reads them.
Columns that no row fills are left out; a key of a row that this file does not know becomes a column of its own.
The table `cards` is no measurement: it is the choice by card of `wan_core.pipeline.card_choice`. `gains` is a short
table over several results (tools/summary_tables.py), `techniques-...` are in tools/techniques.py, `waterfall` in
tools/waterfall.py, `ladder` (tools/ladder_tables.py) has all results of the ladder, and what comes from no result (the
address, files, what fits a card) is in tools/readme_parts.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # not there where this file is run as a script

from tools.ladder_tables import ladder_tables  # noqa: E402
from tools.readme_parts import readme_part  # noqa: E402
from tools.summary_tables import short_table  # noqa: E402
from tools.techniques import RUNS, technique_table  # noqa: E402
from tools.waterfall import waterfall_table  # noqa: E402

REGION = re.compile(r"(?P<open><!-- bench:(?P<name>[\w.-]+) -->\n)(?P<body>.*?)(?P<close><!-- /bench -->)", re.DOTALL)
OPENING = re.compile(r"<!-- bench:")  # a region without its end swallows the next one, or is none
FILE = re.compile(r"(?P<stem>.+)-(?P<date>\d{8})\.json")
HEADERS = {
    "name": "",
    "size": "size",
    "seconds": "seconds",
    "spread": "spread",
    "peak_gib": "peak GiB",
    "activation_gib": "activations GiB",
    "weights_gib": "weights GiB",
    "ratio": "speed-up",
    "ratio_to": "over",
    "tflops": "TFLOP/s",
    "of_peak": "of peak",
    "error": "error",
    "compile_seconds": "compile s",
    "load_seconds": "load s",
    "file_gib": "file GiB",
    "widen_ms": "dequantising ms",
    "latent_psnr": "latents dB",
    "psnr": "frames dB",
    "ssim": "SSIM",
    "captions_true": "captions true",
    "switch_ms": "switch ms",
    "step_spread": "spread of steps",
    "slowdown": "times resident",
    "resident_blocks": "blocks resident",
    "plan_error": "plan off",
    "host_gib": "host GiB",
    "gb_s": "GB/s",
}
# Suites whose rows hold more than a reader wants: these columns and no others.
CHOSEN = {
    "small-cards": "name seconds load_seconds ratio slowdown peak_gib host_gib resident_blocks error same_bytes",
    "single": "name size seconds ratio tflops of_peak peak_gib activation_gib error",
    "trajectory": "name weights steps samples latent_psnr error psnr ssim captions_true",
    "distilled": "name forwards seconds samples background colour shape motion all",
    "gguf": "name size seconds ratio load_seconds file_gib weights_gib peak_gib widen_ms error",
    "parallel": "name size seconds seconds_per_step ratio times_diffusers exchange_share gb_s link peak_gib error",
    "everyday": "name size seconds runs ratio ratio_to_native_gpus error loaders text image samplers decode save",
    "native": "name size seconds ratio error",
    "videos": "name size seconds runs spread load text image denoise decode computed read peak_gib largest_error",
    "attention": "name size seconds ratio tflops error offset outliers sinks structured",
    "int8": "name size seconds ratio peak_gib activation_gib weights_gib error",
    "streaming": "name size seconds slowdown resident_blocks peak_gib plan_error host_gib",
    "startup": "name size seconds ratio gb_s host_gib",
    "caches": "name size seconds share forwards estimate off peak_gib",
    "quality": "name saved forwards psnr psnr_worst ssim perceptual flicker truth look motion seconds ratio",
    "judges": "name size samples psnr psnr_se psnr_worst truth read forwards",
    "four-step": "name size seconds seconds_per_step ratio ratio_to peak_gib file_gib",
    "sparse": "name size seconds forwards ratio peak_gib error",
    "switch": "name size steps seconds step_spread switch_ms peak_gib weights_gib",
}
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "wan_core" / "__init__.py").read_text(encoding="utf-8"))[1]  # type: ignore[index]
MEASURED = "measured"  # the column of rows that another version measured
REASONS = ("why_not", "failed")  # in a row that was not measured
BLOCKS = 40  # of an expert of A14B
PART = re.compile(r"\d+ of 40 blocks")
RANDOM = ("everyday", "everyday-two", "native", "single", "sparse-forward", "parallel", "parallel-two")  # their weights
EVEN = (
    "`error` is empty in rows that read a part: on random weights attention is even, so it says nothing about sparsity."
)
RISKS = (("sparse", "cache"), ("fp8", "int8", "kitchen"))  # words in the names of rows: a part is left out; it rounds
PEAKS = {"bf16_tflops": "bf16 {} TFLOP/s", "fp8_tflops": "FP8 {} TFLOP/s", "copy_tb_s": "copy {} TB/s"}

LADDER = "ladder"  # all results of the ladder: tools/ladder_tables.py
WATERFALL = "waterfall"  # four GPUs on paper: tools/waterfall.py
CARDS = "cards"  # the table of `wan_core.pipeline.card_choice`, of no measurement
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

Result = dict[str, Any]


class TableError(ValueError):
    """A page or a result file cannot be used; says which and what to do."""


def newest_result(name: str, results: Path) -> Result:
    """The newest result called `name`. TableError if there is none, or if two devices share the newest date."""
    found: dict[str, list[tuple[Path, Result]]] = {}
    for path in sorted(results.glob("*.json")):
        match = FILE.fullmatch(path.name)
        if match is None:
            raise TableError(f"{path} is not named <suite>-<device>-<yyyymmdd>.json: rename it")
        result = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in ("suite", "command", "commit", "device", "versions", "rows") if key not in result]
        if missing:
            raise TableError(f"{path} lacks {', '.join(missing)}: write it with `make bench`")
        if name in (match["stem"], result.get("job", result["suite"])):
            found.setdefault(match["date"], []).append((path, result))
    if not found:
        raise TableError(f"a page asks for the table {name!r}, and {results} holds no result of it: run `make bench`")
    newest = found[max(found)]
    if len(newest) > 1:
        names = ", ".join(path.stem.rsplit("-", 1)[0] for path, _ in newest)
        raise TableError(f"the table {name!r} fits several results of one day: name one of {names}")
    date = max(found)
    return newest[0][1] | {"date": f"{date[:4]}-{date[4:6]}-{date[6:]}"}


def newest_or_none(job: str, results: Path) -> Result | None:
    """The newest result of a job of the ladder, of any device; of several of one day the last by name."""
    paths = [path for path in results.glob(f"{job}-*.json") if FILE.fullmatch(path.name)]
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    dated = sorted((FILE.fullmatch(path.name)["date"], path.name) for path, one in found if one.get("job") == job)  # type: ignore[index]
    return newest_result(dated[-1][1].rsplit("-", 1)[0], results) if dated else None


def cell(value: object) -> str:
    """A table cell: numbers with three significant digits, and a bar escaped."""
    if value is None:
        return ""
    if isinstance(value, float) and value:
        text = f"{value:.3g}"
        return f"{value:.0f}" if "e+" in text else text
    return str(value).replace("|", "\\|")


def table(result: Result) -> str:
    """The Markdown of one result: a table of its rows, and a line that says where it was measured and how."""
    rows: list[Result] = [named(row | row.get("nodes", {}), result) | measured(row, result) for row in result["rows"]]
    if not rows:
        raise TableError(f"the suite {result['suite']!r} of {result['device']} has no rows: measure it again")
    if result["suite"] in ("everyday", "native"):
        rows = by_risk(rows)
    sparse = [row for row in rows if result["suite"] in RANDOM and "sparse" in row["name"] and row.pop("error", None)]
    rows = [row for row in rows if row not in sparse or "seconds" in row]
    present = {key: None for row in rows for key, value in row.items() if value is not None}
    columns = [key for key in HEADERS if key in present] + [key for key in present if key not in HEADERS]
    if result["suite"] in CHOSEN:
        columns = [key for key in CHOSEN[result["suite"]].split() if key in present]
    columns = [key for key in columns if key not in (*REASONS, "commit", MEASURED)] + [MEASURED] * (MEASURED in present)
    rows = [with_reason(row, columns) for row in rows]
    lines = [
        "| " + " | ".join(HEADERS.get(key, key.replace("_", " ")) for key in columns) + " |",
        "|"
        + "|".join("---:" if any(isinstance(row.get(key), int | float) for row in rows) else "---" for key in columns)
        + "|",
        *("| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in rows),
    ]
    lines += ["", EVEN] if sparse else []
    lines += origin(result)
    if "peaks" in result:
        peaks = ", ".join(
            text.format(cell(result["peaks"][key])) for key, text in PEAKS.items() if key in result["peaks"]
        )
        lines.insert(-1, f"Peaks measured in the same run: {peaks}.")
    return "\n".join(lines)


def named(row: Result, result: Result) -> Result:
    """A row that says in its name how much of it was measured: blocks of the model, and steps."""
    name, layers = row["name"], row.get("layers", result.get("layers"))
    said = (
        [f"{layers} of {BLOCKS} blocks"] if isinstance(layers, int) and layers < BLOCKS and "block" not in name else []
    )
    said += [f"scaled from {row['steps_measured']} steps"] if "steps_measured" in row else []
    return row | {"name": f"{name} ({', '.join(said)})" if said else name}


def measured(row: Result, result: Result) -> Result:
    """When and at which commit a row was measured, if not in this version."""
    if result.get("version") == VERSION or "date" not in result:
        return {}
    return {MEASURED: f"{result['date']} {short_commit(row.get('commit', result['commit']))}"}


def by_risk(rows: list[Result]) -> list[Result]:
    """The rows of each setting and size: what is exact first, then what rounds, last what leaves something out."""
    groups: dict[tuple[object, ...], int] = {}

    def place(row: Result) -> tuple[int, int]:
        setting, blocks = row["name"].partition(":")[0], PART.search(row["name"])
        group = (setting, row.get("size"), blocks and blocks[0])
        risk = next((2 - n for n, words in enumerate(RISKS) if any(word in row["name"] for word in words)), 0)
        return groups.setdefault(group, len(groups)), risk

    return sorted(rows, key=place)


def origin(result: Result) -> list[str]:
    """The last lines of a table: where it was measured, and by which command."""
    versions = ", ".join(f"{library} {version}" for library, version in result["versions"].items())
    return ["", f"{result['device']}; {versions}; commit {short_commit(result['commit'])}: `{result['command']}`", ""]


def short_commit(commit: object) -> str:
    """Several, in words, or one hash."""
    return str(commit) if " " in str(commit) else str(commit)[:12]


def cards_table() -> str:
    """The Markdown of `wan_core.pipeline.card_choice` for cards as people have them, all optional libraries there."""
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
    return "\n".join([*lines, ""])


def with_reason(row: Result, columns: list[str]) -> Result:
    """A row that has a reason in place of numbers says it where the first of them would stand."""
    reason = next((row[key] for key in REASONS if key in row), None)
    if reason is None:
        return row
    first = next(key for key in (*columns, "") if key not in ("name", "size", "weights"))
    return row | {first: f"*{reason.partition(':')[0]}*"}  # how to install it: doctor says


def body_of(name: str, results: Path) -> str:
    """The Markdown of the table called `name`."""
    if name == CARDS:
        return cards_table()
    if name == LADDER:
        return ladder_tables(lambda job: newest_or_none(job, results), lambda result: table(dict(result)))
    if (part := readme_part(name)) is not None:
        return part
    if (result := name.partition("-x86")[0]) in RUNS:
        found = newest_result(name, results)
        return "\n".join([*technique_table(result, found), *origin(found)])
    try:
        if name == WATERFALL:
            return waterfall_table(lambda result: newest_result(result, results), cell)
        short = short_table(name, lambda result: newest_result(result, results), cell, measured)
    except KeyError as missing:
        raise TableError(f"the table {name!r} asks for the row {missing}, which its newest result lacks") from missing
    return table(newest_result(name, results)) if short is None else short


def rewrite(text: str, results: Path) -> tuple[str, list[str]]:
    """`text` with its tables made anew, and the names of those that changed. TableError for a region without end."""
    changed = []

    def replace(match: re.Match[str]) -> str:
        body = body_of(match["name"], results)
        if body != match["body"]:
            changed.append(match["name"])
        return match["open"] + body + match["close"]

    if len(OPENING.findall(text)) != len(REGION.findall(text)):
        raise TableError("write `<!-- bench:NAME -->` on a line of its own, and end each with `<!-- /bench -->`")
    return REGION.sub(replace, text), changed


def pages_of(root: Path) -> list[Path]:
    """Every page that may hold tables."""
    return [*sorted(root.glob("README*.md")), *sorted(root.glob("docs/*.md"))]


def main(argv: list[str] | None = None, *, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is stale")
    options = parser.parse_args(argv)
    stale = False
    for page in pages_of(root):
        name = page.relative_to(root).as_posix()
        try:
            text, changed = rewrite(page.read_text(encoding="utf-8"), root / "benchmarks" / "results")
        except TableError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if changed and options.check:
            print(f"{name} is stale ({', '.join(changed)}): run python tools/readme_tables.py", file=sys.stderr)
        elif changed:
            page.write_text(text, encoding="utf-8")
            print(f"{name}: rewrote {', '.join(changed)}")
        stale |= bool(changed)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
