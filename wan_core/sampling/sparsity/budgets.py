"""How much attention a share of the blocks covers in each layer of a model, and budgets for its layers that follow.

`Coverage` is what a calibration measures on a dense reference run (`python -m wan_core calibrate --sparsity`): for each
layer and head the mean attention mass on the blocks that the router picks at several shares. It is a small JSON file
beside the expert's checkpoint. A plan that reads a share of the blocks on average gives more of them to layers that
need them: blocks go one by one to the layer whose mass grows most.

Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path

from wan_core.config import OptionError, SparseOptions
from wan_core.sampling.plan import Expert, Plan

FORMAT = "wancore-sparse-coverage/1"
SUFFIX = ".sparse.json"
SHARES = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
STEPS = 64  # parts in which a layer's blocks are shared out
LEAST = 4  # of them, that a layer keeps whatever it covers
_ENDINGS = (".index.json", ".safetensors", ".gguf", ".pth")


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """`mass[layer][head][i]` of attention lies on `shares[i]` of the blocks, as the router picks them."""

    task: str
    source: str
    expert: str  # high or low
    tokens: int
    block: int
    samples: int  # forwards that were measured
    shares: tuple[float, ...]
    mass: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        rows = [head for layer in self.mass for head in layer]
        increasing = all(a < b for a, b in pairwise(self.shares))
        fits = rows and all(
            len(row) == len(self.shares) and all(isfinite(m) and 0 <= m <= 1.01 for m in row) for row in rows
        )
        if not fits or len(self.shares) < 2 or not increasing or not 0 < self.shares[0] < self.shares[-1] <= 1:
            raise OptionError(
                f"the coverage of {self.task} has {len(rows)} rows for {len(self.shares)} shares; it needs a mass from "
                "0 to 1 for each share, and shares that grow up to 1: calibrate it again"
            )

    def of_layer(self, layer: int, share: float) -> float:
        """The mean over heads of the mass on `share` of the blocks, between measured shares on a straight line."""
        means = [sum(column) / len(column) for column in zip(*self.mass[layer], strict=True)]
        points = [(0.0, 0.0), *zip(self.shares, means, strict=True)]
        for (x0, y0), (x1, y1) in pairwise(points):
            if share <= x1:
                return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
        return means[-1]


def choose_keeps(coverage: Coverage, keep: float) -> tuple[float, ...]:
    """A share of the blocks for every layer, `keep` on average, that covers the most mass over all layers."""
    layers = range(len(coverage.mass))
    table = [[coverage.of_layer(layer, i / STEPS) for i in range(STEPS + 1)] for layer in layers]
    table = [_concave(row) for row in table]
    parts = [min(LEAST, max(1, round(keep * STEPS)))] * len(table)
    for _ in range(round(keep * STEPS * len(table)) - sum(parts)):
        open_ = [layer for layer in layers if parts[layer] < STEPS]
        if not open_:
            break
        best = max(open_, key=lambda layer: table[layer][parts[layer] + 1] - table[layer][parts[layer]])
        parts[best] += 1
    return tuple(part / STEPS for part in parts)


def _concave(values: Sequence[float]) -> list[float]:
    """The smallest concave line above `values`: growth by parts must not hide more growth behind it."""
    hull: list[int] = []
    for i, value in enumerate(values):
        while len(hull) >= 2 and _above(values, hull[-2], hull[-1], i, value):
            hull.pop()
        hull.append(i)
    found = []
    for left, right in pairwise(hull):
        slope = (values[right] - values[left]) / (right - left)
        found += [values[left] + slope * j for j in range(right - left)]
    return [*found, values[hull[-1]]]


def _above(values: Sequence[float], first: int, middle: int, last: int, value: float) -> bool:
    return (values[middle] - values[first]) * (last - first) <= (value - values[first]) * (middle - first)


# --------------------------------------------------------------------------------------------------------------- files


def coverage_path(checkpoint: Path, task: str, expert: str) -> Path:
    """Where the coverage of an expert goes: beside its file, or in its folder."""
    if checkpoint.is_dir():
        return checkpoint / f"{task}.{expert}{SUFFIX}"
    stem = checkpoint.name
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    return checkpoint.with_name(f"{stem}{SUFFIX}")


def write_coverage(coverage: Coverage, path: Path) -> Path:
    found = asdict(coverage)
    found["mass"] = [[[round(m, 4) for m in head] for head in layer] for layer in coverage.mass]
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in {"format": FORMAT, **found}.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def read_coverage(path: Path) -> Coverage:
    """Raises OptionError for a file that is none."""
    try:
        found = json.loads(path.read_text())
        if found.pop("format", None) != FORMAT:
            raise OptionError(f"{path} is not a coverage of the form {FORMAT}: calibrate it again")
        shares = tuple(float(share) for share in found.pop("shares"))
        mass = tuple(tuple(tuple(float(m) for m in head) for head in layer) for layer in found.pop("mass"))
        return Coverage(shares=shares, mass=mass, **found)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as fault:
        if isinstance(fault, OptionError):
            raise
        raise OptionError(f"{path} is not a coverage ({fault}): calibrate it again, or delete it") from fault


def find_keeps(
    plan: Plan, options: SparseOptions, checkpoint: Path | None, low: Path | None
) -> dict[Expert, tuple[float, ...]]:
    """By expert, the shares of its layers where its checkpoint has a coverage beside it. Raises OptionError for a file
    that is damaged or of another task."""
    found: dict[Expert, tuple[float, ...]] = {}
    places: tuple[tuple[Expert, Path | None], ...] = (("high", checkpoint), ("low", low))
    for expert, place in places:
        path = None if place is None else coverage_path(place, plan.task, expert)
        if path is None or not path.is_file() or expert not in plan.experts:
            continue
        coverage = read_coverage(path)
        if coverage.task != plan.task:
            raise OptionError(
                f"{path} is a coverage of {coverage.task}, and the model is {plan.task}: calibrate it again, or move "
                "the file away"
            )
        found[expert] = choose_keeps(coverage, 1 - options.sparsity)
    return found
