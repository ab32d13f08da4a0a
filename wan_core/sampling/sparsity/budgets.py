"""Calibrated budgets of sparse attention: which share of the blocks each layer of a model reads. Without torch.

`Coverage` is measured on a dense reference run (`python -m wan_core calibrate --sparsity`): for each layer and head the
mean attention mass on the blocks that the router selects, at several shares of the blocks. It is stored as a small JSON
file beside the expert's checkpoint. `choose_keeps` distributes a total number of blocks over the layers: one part at a
time goes to the layer whose attention mass grows most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path

from wan_core.config import OptionError, SparseOptions
from wan_core.sampling.calibration_files import CalibrationFiles, Measured
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Expert

SHARES = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
STEPS = 64  # a layer's blocks are distributed in parts of 1 / STEPS
LEAST = 4  # parts that every layer reads at least


@dataclass(frozen=True, kw_only=True)
class Coverage(Measured):
    """`mass[layer][head][i]` is the share of attention that lies on the `shares[i]` of the blocks that the router
    selects. Raises OptionError for masses or shares out of range."""

    expert: str  # high or low
    tokens: int
    block: int
    samples: int  # number of forwards measured
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
                f"the coverage of {self.task} has {len(rows)} rows for {len(self.shares)} shares; each share needs a "
                "mass from 0 to 1, and shares must increase up to 1: calibrate it again"
            )

    def of_layer(self, layer: int, share: float) -> float:
        """The mean over heads of the mass on `share` of the blocks, linearly interpolated between measured shares."""
        means = [sum(column) / len(column) for column in zip(*self.mass[layer], strict=True)]
        points = [(0.0, 0.0), *zip(self.shares, means, strict=True)]
        for (x0, y0), (x1, y1) in pairwise(points):
            if share <= x1:
                return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
        return means[-1]


def choose_keeps(coverage: Coverage, keep: float) -> tuple[float, ...]:
    """The share of the blocks for every layer that covers the most mass in total, with mean `keep` over the layers."""
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
    """The smallest concave curve above `values`, so that a part with little growth does not hide larger growth after
    it."""
    hull: list[int] = []
    for i, value in enumerate(values):
        while len(hull) >= 2:
            first, middle = hull[-2:]
            if (values[middle] - values[first]) * (i - first) > (value - values[first]) * (middle - first):
                break
            hull.pop()  # it is below the line from the first to this one
        hull.append(i)
    curve = []
    for left, right in pairwise(hull):
        slope = (values[right] - values[left]) / (right - left)
        curve += [values[left] + slope * j for j in range(right - left)]
    return [*curve, values[hull[-1]]]


# --------------------------------------------------------------------------------------------------------------- files


COVERAGE_FILES = CalibrationFiles(
    kind=Coverage,
    what="a coverage",
    format="wancore-sparse-coverage/1",
    suffix=".sparse.json",
    digits={"mass": 4},
)


def find_keeps(
    plan: Plan, options: SparseOptions, checkpoint: Path | None, low: Path | None
) -> dict[Expert, tuple[float, ...]]:
    """The share of the blocks per layer, for each expert with a coverage file beside its checkpoint.

    Raises OptionError for a file that is damaged or measured for another task.
    """
    keeps: dict[Expert, tuple[float, ...]] = {}
    checkpoints: tuple[tuple[Expert, Path | None], ...] = (("high", checkpoint), ("low", low))
    for expert, file in checkpoints:
        path = None if file is None else COVERAGE_FILES.beside(file, f"{plan.task}.{expert}")
        if path is not None and path.is_file() and expert in plan.experts:
            keeps[expert] = choose_keeps(COVERAGE_FILES.read(path, [plan.task]), 1 - options.sparsity)
    return keeps


def keeps_of(options: SparseOptions, checkpoint: Path | None, layers: int) -> tuple[float, ...] | None:
    """The share of the blocks per layer for a transformer of `layers` whose task is not known, if a coverage file is
    beside its checkpoint file. Raises OptionError for one that is damaged or of another model."""
    path = None if checkpoint is None or not options.budgets else COVERAGE_FILES.beside(checkpoint, "")
    if path is None or not path.is_file():
        return None
    keeps = choose_keeps(COVERAGE_FILES.read(path), 1 - options.sparsity)
    if len(keeps) != layers:
        raise OptionError(
            f"{path} has {len(keeps)} layers, and the model has {layers}: calibrate it again, or move the file away"
        )
    return keeps
