"""Write the tables of the README and docs/ from the committed results, so that no number is typed by hand.

    python tools/readme_tables.py            rewrite README.md, README.zh.md and docs/*.md
    python tools/readme_tables.py --check    exit 1, naming pages and tables, if one does not show the newest results

A table stands between `<!-- bench:NAME -->` and `<!-- /bench -->`. Measurements are written by tools/measured.py; what
comes from no result (the address, files, what fits a card, the choice by card) by tools/readme_parts.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # not there where this file is run as a script

from tools.gains import gains  # noqa: E402
from tools.measured import TableError, measured_table  # noqa: E402
from tools.readme_parts import readme_part  # noqa: E402

REGION = re.compile(r"(?P<open><!-- bench:(?P<name>[\w.-]+) -->\n)(?P<body>.*?)(?P<close><!-- /bench -->)", re.DOTALL)
OPENING = re.compile(r"<!-- bench:")  # a region without its end swallows the next one, or is none


def body_of(name: str, results: Path) -> str:
    """The Markdown of the table called `name`."""
    kind, _, language = name.partition(".")
    if kind == "gains":
        return gains(results, language or "en")
    part = readme_part(name)
    return measured_table(name, results) if part is None else part


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
