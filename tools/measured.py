"""Tables of measurements: which rows of which committed result a page shows, and their Markdown.

A result is `benchmarks/results/<suite>-<device>-<yyyymmdd>.json`: {"suite", "command", "commit", "device", "versions":
{library: version}, "rows": [{"name", "seconds", ...}]}. Results in `archive` are for figures of the prose alone.
`TABLES` has the tables of docs/benchmarks.md and docs/earlier.md. Any other name is a suite (`streaming`), or a suite
and a device (`streaming-h200`), whose newest result is shown whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Result = dict[str, Any]
FILE = re.compile(r"(?P<stem>.+)-(?P<date>\d{8})\.json")
HEADERS = {
    "name": "",
    "ratio": "speed-up",
    "ratio_to": "over",
    "peak_gib": "peak GiB",
    "activation_gib": "activations GiB",
    "weights_gib": "weights GiB",
    "file_gib": "file GiB",
    "host_gib": "host GiB",
    "disk_gb": "read from disk GB",
    "gb_s": "GB/s",
    "tflops": "TFLOP/s",
    "load_seconds": "load s",
    "warm_s": "warm s",
    "cold_s": "first run s",
    "widen_ms": "dequantising ms",
    "latent_psnr": "latents dB",
    "psnr": "frames dB",
    "psnr_se": "±",
    "psnr_worst": "worst dB",
    "ssim": "SSIM",
    "truth": "captions true",
    "slowdown": "times resident",
    "resident_blocks": "blocks resident",
    "plan_error": "plan off",
    "left": "left of it",
    "left_of_rows": "± over rows",
    "product_error": "error of what it adds",
}
SHOWN = {  # suite -> the columns of a table that shows a whole result; of others all columns
    "small-cards": "name seconds load_seconds ratio slowdown peak_gib host_gib resident_blocks error same_bytes",
    "gguf": "name size seconds ratio load_seconds file_gib weights_gib peak_gib widen_ms error",
    "streaming": "name size seconds slowdown resident_blocks peak_gib plan_error host_gib",
    "startup": "name size seconds ratio gb_s host_gib",
    "quality": "name saved forwards psnr psnr_worst ssim perceptual flicker truth look motion seconds ratio",
}
NOT_SHOWN = ("why_not", "failed", "commit")  # the first two stand in place of numbers
BLOCKS = 40  # of an expert of A14B


class TableError(ValueError):
    """A page or a result file cannot be used; says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of one result. columns: keys of the rows, or of their `nodes`; none: all. rows: a regular expression for
    names. over: heading -> the row whose seconds are divided by those of each row."""

    result: str
    columns: str = ""
    rows: str = ""
    size: str = ""
    over: Mapping[str, str] = field(default_factory=dict)
    judged: bool = False  # a row is a setting, with dB of each judge in each precision


FIRST_SEED = "on, new seed: "
PHASES = "samplers decode save"
FOUR_STEPS = Table(
    result="",
    columns=f"name seconds spread runs {PHASES}",
    over={"over native": f"{FIRST_SEED}native", "over INT8": f"{FIRST_SEED}native, comfy kitchen attention"},
)
FRESH = Table(
    result="everyday-fresh-h200",
    columns=f"name seconds spread runs text image {PHASES}",
    over={
        "over native": "on, new prompt and picture: native",
        "over INT8": "on, new prompt and picture: native, comfy kitchen attention",
    },
)
GUIDED = Table(
    result="everyday-off-h200",
    columns=f"name seconds runs {PHASES}",
    over={"over INT8": "off: native, comfy kitchen attention"},
)
TABLES = {
    "four-steps": replace(FOUR_STEPS, result="everyday-on-h200"),
    "four-steps-wide": replace(FOUR_STEPS, result="everyday-wide-h200"),
    "four-steps-720": replace(FOUR_STEPS, result="everyday-on720-h200"),
    "fresh": FRESH,
    "fresh-720": replace(FRESH, result="everyday-fresh720-h200"),
    "words-seconds": Table(
        result="everyday-words-h200",
        columns="name seconds spread runs samplers",
        over={"over INT8": f"{FIRST_SEED}native, comfy kitchen attention"},
    ),
    "guided": GUIDED,
    "guided-480": replace(GUIDED, result="everyday-off480-h200", columns=f"name seconds spread runs {PHASES}"),
    "guided-rival": replace(GUIDED, result="everyday-rival480-h200", columns=f"name seconds spread runs {PHASES}"),
    "guided-720": replace(GUIDED, result="everyday-off720-h200"),
    "first-video": Table(
        result="everyday-cold-h200",
        columns=f"name seconds spread runs loaders text image {PHASES}",
        over={"over native": "cold: native", "over INT8": "cold: native, comfy kitchen attention"},
    ),
    "two-gpus": Table(
        result="two-gpus-on-h200",
        columns=f"name seconds spread runs {PHASES}",
        over={"over INT8": f"{FIRST_SEED}native, comfy kitchen attention"},
    ),
    "four-gpus": Table(
        result="parallel-h200",
        rows="diffusers|fp8(?!.*both ways)",
        size="1280x720x81",
        columns="name seconds ratio times_diffusers exchange_share peak_gib error",
    ),
    "small-machines": Table(
        result="small-h100",
        rows="(?!.*host 16)",  # it ended there; mended since, below
        columns="name seconds load text denoise decode peak_gib disk_gb",
    ),
    "little-host": Table(
        result="small-h200",
        columns="name seconds slowdown load text denoise decode peak_gib disk_gb",
    ),
    "other-models": Table(result="templates-h200", columns="name size seconds ratio peak_gib error"),
    "other-models-part": Table(
        result="native-h200",
        rows=r"video_wan(2_2_14B_s2v(?!.*sparse)|_animate2 \(12)",
        columns="name size seconds ratio error",
    ),
    "one-forward": Table(
        result="single-h200",
        rows=".*(?<!te-fp8)$",
        size="1280x720x81",
        columns="name seconds ratio tflops of_peak peak_gib activation_gib error",
    ),
    "kernels": Table(
        result="attention-h200",
        rows="(?!te-fp8|triton)",
        size="1280x720x81",
        columns="name seconds ratio tflops error offset outliers sinks structured",
    ),
    "words": Table(
        result="judges-h100",
        rows=r"test bed, .*: (bf16|magcache:(balanced|fast|0.12/2/0.2:published)|sparse.*|taylorseer:"
        r"(2/1/0.25|2/1/0.4|3/1/0.2|3/1/0.3))$",
        judged=True,
    ),
    "words-by-steps": Table(
        result="judges-h200",
        rows=r"test bed, .*: (bf16|steps:(19|28)|easy:0.[12]|sol:(0|1.3)|magcache:0.12/1/0.4|"
        r"taylorseer:(2/1/0.25|2/1/0.[457]|3/1/0.[24]))$",
        judged=True,
    ),
    "rounding": Table(
        result="trajectory-40-h200", columns="name weights steps samples latent_psnr error psnr ssim captions_true"
    ),
}


def newest_result(name: str, results: Path) -> Result:
    """The newest result called `name`, with its `date`. TableError if there is none, or if two devices share the
    newest date."""
    dated: dict[str, list[tuple[Path, Result]]] = {}
    for path in sorted(results.glob("*.json")):
        match = FILE.fullmatch(path.name)
        if match is None:
            raise TableError(f"{path} is not named <suite>-<device>-<yyyymmdd>.json: rename it")
        result = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in ("suite", "command", "commit", "device", "versions", "rows") if key not in result]
        if missing:
            raise TableError(f"{path} lacks {', '.join(missing)}: write it with `make bench`")
        if name in (match["stem"], result.get("job", result["suite"])):
            dated.setdefault(match["date"], []).append((path, result))
    if not dated:
        raise TableError(f"a page asks for the table {name!r}, and {results} holds no result of it: run `make bench`")
    date, newest = max(dated.items())
    if len(newest) > 1:
        names = ", ".join(path.stem.rsplit("-", 1)[0] for path, _ in newest)
        raise TableError(f"the table {name!r} fits several results of one day: name one of {names}")
    return newest[0][1] | {"date": f"{date[:4]}-{date[4:6]}-{date[6:]}"}


def measured_table(name: str, results: Path) -> str:
    """The Markdown of the table called `name`: its rows, and a line that says where and how they were measured."""
    table = TABLES.get(name, Table(result=name))
    result = newest_result(table.result, results)
    rows = [row | row.get("nodes", {}) for row in result["rows"] if re.match(table.rows, row["name"])]
    rows = [named(row, result) for row in rows if table.size in ("", row.get("size"))]
    rows = by_setting(rows) if table.judged else rows
    if not rows:
        raise TableError(f"the table {name!r} has no rows in the newest result of {table.result}: measure it again")
    for heading, base in table.over.items():
        seconds = find(rows, base, name)["seconds"]
        rows = [row | ({heading: seconds / row["seconds"]} if row.get("seconds") else {}) for row in rows]
    rows = without_common_part(rows)
    present = {key: None for row in rows for key, value in row.items() if value is not None}
    wanted = [] if table.judged else (table.columns or SHOWN.get(result["suite"], "")).split()
    wanted = wanted or sorted(present, key=lambda key: key == "captions")
    columns = [key for key in [*wanted, *table.over] if key in present and key not in NOT_SHOWN]
    return "\n".join([*markdown([with_reason(row, columns) for row in rows], columns), *origin(rows, result)])


def without_common_part(rows: list[Result]) -> list[Result]:
    """Rows without what all their names begin with before a colon: the text over the table says it."""
    parts = {row["name"].rpartition(": ")[0] for row in rows}
    return [row | {"name": row["name"].rpartition(": ")[2]} for row in rows] if len(rows) > 1 == len(parts) else rows


def by_setting(rows: list[Result]) -> list[Result]:
    """A row for each setting, the most steps and forwards first: mean and worst dB against the full run of each judge
    in each precision, and the share of captions of the first judge that come true."""
    settings: dict[tuple[int, str], Result] = {}
    several = len({row["steps"] for row in rows}) > 1
    for row in sorted(rows, key=lambda row: (-row["steps"], "image" in row["name"])):
        judge, _, name = row["name"].removeprefix("test bed, ").replace(", whole size", "").partition(": ")
        name = re.sub(r"(taylorseer:\d)/1(/)|(sparse:[\d.]+)/0", r"\1\2\3", name)  # options that are gone
        about = {"steps": row["steps"]} if several else {}
        new = about | {"name": name, "forwards": row["forwards"], "captions": {}}
        one = settings.setdefault((row["steps"], name), new)
        precision = "FP8" if row["precision"] == "fp8" else "fp32"
        one["captions"].setdefault(precision, f"{row['truth']:.2f}")
        if "psnr" in row:
            one[f"{judge}, {precision}"] = f"{row['psnr']:.1f} / {row['psnr_worst']:.1f}"
    shown = [row | {"captions": ", ".join(row.pop("captions").values())} for row in settings.values()]
    return sorted(shown, key=lambda row: (-row.get("steps", 0), -row["forwards"]))


def markdown(rows: list[Result], columns: list[str]) -> list[str]:
    numbers = [any(isinstance(row.get(key), int | float) for row in rows) for key in columns]
    return [
        "| " + " | ".join(HEADERS.get(key, key.replace("_", " ")) for key in columns) + " |",
        "|" + "|".join("---:" if number else "---" for number in numbers) + "|",
        *("| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in rows),
    ]


def cell(value: object) -> str:
    """A table cell: numbers with three significant digits, and a bar escaped."""
    if value is None:
        return ""
    if isinstance(value, float) and value:
        text = f"{value:.3g}"
        return f"{value:.0f}" if "e+" in text else text
    return str(value).replace("|", "\\|")


def named(row: Result, result: Result) -> Result:
    """A row that says in its name how much of it was measured: blocks of the model, and steps."""
    name, layers = row["name"], row.get("layers", result.get("layers"))
    part = isinstance(layers, int) and layers < BLOCKS and "block" not in name
    notes = [f"{layers} of {BLOCKS} blocks"] if part else []
    notes += [f"scaled from {row['steps_measured']} steps"] if "steps_measured" in row else []
    return row | {"name": f"{name} ({', '.join(notes)})" if notes else name}


def with_reason(row: Result, columns: list[str]) -> Result:
    """A row that has a reason in place of numbers says it where the first of them would stand."""
    reason = row.get("why_not") or row.get("failed")
    if reason is None:
        return row
    first = next(key for key in (*columns, "") if key not in ("name", "size", "weights"))
    return row | {first: f"*{reason.partition(':')[0]}*"}  # how to install it: doctor says


def origin(rows: list[Result], result: Result) -> list[str]:
    """The last lines of a table: card, date, commit and command."""
    versions = ", ".join(f"{library} {version}" for library, version in result["versions"].items())
    commits = ", ".join(dict.fromkeys(str(row.get("commit", result["commit"])) for row in rows))
    commit = commits if " " in commits else commits[:12]
    return ["", f"{result['device']}, {result['date']}; {versions}; commit {commit}: `{result['command']}`", ""]


def find(rows: Iterable[Result], name: str, table: str) -> Result:
    for row in rows:
        if row["name"] == name:
            return row
    raise TableError(f"the table {table!r} asks for the row {name!r}, which its newest result lacks")
