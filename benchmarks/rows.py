"""Rows of a measurement: how one is made where its work may fail, and how they are printed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
# What third-party kernels raise on a machine that they do not support. The row shows it, and the others go on.
FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError, OSError)


def guarded(name: str, size: str, reason: str | None, make: Callable[[], Row]) -> Row:
    """A row of the numbers that `make` returns; of `reason` where it cannot run; or of what went wrong."""
    row: Row = {"name": name, "size": size}
    if reason is not None:
        return row | {"why_not": reason}
    try:
        return row | make()
    except FAULTS as fault:
        traceback.print_exc(file=sys.stderr)
        return row | {"failed": f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0][:300]}"}


COLUMNS = (
    "seconds", "spread", "ratio", "ratio_to_native_gpus", "tflops", "peak_gib", "weights_gib", "activation_gib",
    "compile_seconds", "compilations", "error", "outliers", "slowdown",
)  # fmt: skip


def table(rows: list[Row]) -> str:
    """The rows as text: a column for each number of `COLUMNS` that any row has, or the reason why there is none."""
    shown = [column for column in COLUMNS if any(column in row for row in rows)]
    width = max((len(row["name"]) for row in rows), default=0)
    widths = [max(9, len(column)) + 2 for column in shown]
    heads = "".join(f"{column:>{size}}" for column, size in zip(shown, widths, strict=True))
    lines = [f"{'size':<14}  {'name':<{width}}{heads}"]
    for row in rows:
        texts = [f"{row[column]:.4g}" if column in row else "" for column in shown]
        numbers = "".join(f"{text:>{size}}" for text, size in zip(texts, widths, strict=True))
        reason = row.get("why_not") or row.get("failed")
        lines.append(f"{row['size']:<14}  {row['name']:<{width}}" + (f"  {reason}" if reason else numbers))
    return "\n".join(lines)
