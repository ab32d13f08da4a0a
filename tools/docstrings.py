"""Refuse docstrings that begin with Of, As or Likewise: such a fragment does not name its subject.

    python tools/docstrings.py             every file of the engine, the lab, nodes, benchmarks, tools and tests
    python tools/docstrings.py FILE ...    these files

Prints each as FILE:LINE and its first words, and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("wan_core", "wan_lab", "nodes", "benchmarks", "tools", "tests")
FRAGMENT = re.compile(r"(Of|As|Likewise)\b")
QUOTED = re.compile(r"['\"]\s*(Of|As|Likewise)\b")  # somewhere in a file: only these files are parsed


def fragments(source: str) -> Iterator[tuple[int, str]]:
    """The line and the first line of text of each docstring in `source` that begins with one of these words."""
    if QUOTED.search(source) is None:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and FRAGMENT.match(text):
                yield node.body[0].lineno, text.splitlines()[0]


def main(paths: list[str]) -> int:
    files = [Path(path) for path in paths] or sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    refused = [f"{file}:{line}: {text}" for file in files for line, text in fragments(file.read_text(encoding="utf-8"))]
    for line in refused:
        print(line)
    if refused:
        print("A docstring names its subject: `The speech encoder of a task that takes sound`, not `Of a task ...`.")
    return 1 if refused else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
