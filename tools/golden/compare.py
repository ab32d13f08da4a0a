"""Two recordings, side by side."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from difflib import ndiff
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tools.golden.commands import Case

FILE = "golden.json.gz"
SHOWN = 12  # lines of a text that differ


def read(folder: Path, only: str = "*") -> dict[str, Case]:
    """The cases of a recording whose name matches."""
    cases = json.loads(gzip.decompress((folder / FILE).read_bytes()))["cases"]
    return {name: case for name, case in cases.items() if fnmatchcase(name, only)}


def write(folder: Path, about: Case, cases: dict[str, Case]) -> Path:
    text = json.dumps({"about": about, "cases": cases}, ensure_ascii=False, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(gzip.compress(text.encode(), mtime=0))
    return folder / FILE


def compare(old: Path, new: Path, only: str) -> int:
    """Print every difference, then a table by group; 0 where there is none."""
    before, after = read(old, only), read(new, only)
    partial = json.loads(gzip.decompress((new / FILE).read_bytes()))["about"]["only"]
    names = [name for name in dict.fromkeys([*before, *after]) if fnmatchcase(name, partial)]
    counts: dict[str, Counter[str]] = {}
    for name in names:
        count = counts.setdefault(name.partition("/")[0], Counter())
        count["cases"] += 1
        if name not in after or name not in before:
            count["gone" if name not in after else "new"] += 1
            print(f"{name}\n    is only in {old if name not in after else new}")
        elif before[name] != after[name]:
            count["differ"] += 1
            print("\n".join([name, *(f"    {line}" for line in differences(before[name], after[name]))]))
    print(f"\n{'group':<12}{'cases':>8}{'differ':>8}{'gone':>8}{'new':>8}")
    for group, count in counts.items():
        print(f"{group:<12}" + "".join(f"{count[kind]:>8}" for kind in ("cases", "differ", "gone", "new")))
    found = sum(count[kind] for count in counts.values() for kind in ("differ", "gone", "new"))
    print(f"{found} differences" if found else "no difference" if names else "no case")
    return int(bool(found) or not names)


def differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Where two values differ, a line or a few each."""
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        if "sha256" in old and "sha256" in new:
            return [f"{place}: {distance(old, new)}"]
        keys = dict.fromkeys([*old, *new])
        return [
            line
            for key in keys
            for line in differences(old.get(key), new.get(key), f"{place} > {key}" if place else key)
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for n, pair in pairs for line in differences(*pair, f"{place}[{n}]")]
    if isinstance(old, str) and isinstance(new, str) and ("\n" in old or "\n" in new):
        changed = [line for line in ndiff(old.splitlines(), new.splitlines()) if line[0] in "+-"]
        return [
            f"{place}:",
            *(f"  {line[:300]}" for line in changed[:SHOWN]),
            *(["  ..."] if len(changed) > SHOWN else []),
        ]
    return [f"{place}: {short(old)} -> {short(new)}"]


def distance(old: Case, new: Case) -> str:
    """How far apart two arrays are, by the few numbers that are kept of each."""
    for key in ("shape", "dtype"):
        if old.get(key) != new.get(key):
            return f"{key} {old.get(key)} -> {new.get(key)}"
    a, b = old.get("samples"), new.get("samples")
    if not a or not b:
        return "other contents"
    largest = max(abs(x - y) for x, y in zip(a, b, strict=True))
    std = old["mean, std, min, max"][1]
    return f"other numbers: of 12 samples the largest difference is {largest:.3g}; their spread is {std:.3g}"


def short(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)[:300]
