"""What the last bounded run with some weights read: a small file beside them, for the estimates of the next plan.

A run is never controlled by it. The command line writes it where the folder can be written to, but not for the embedded
model; nodes and what workers sample for them write nothing beside models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan_core.config import OptionError, SparseOptions
from wan_core.sampling.calibration_files import CalibrationFiles, Measured, is_embedded
from wan_core.sampling.sparsity.schedule import sparse_words
from wan_core.sampling.steps import Expert

SHARES = (1e-3, 1.0)  # what can be


@dataclass(frozen=True, kw_only=True)
class LastRun(Measured):
    """source: the sparse attention of the run, as the command line writes it. share, error: means over its computed
    steps, of the keys that were read and of the relative error of attention."""

    expert: str  # high or low
    steps: int
    share: float
    error: float

    def __post_init__(self) -> None:
        if not SHARES[0] <= self.share <= SHARES[1] or not self.error >= 0:
            raise OptionError(f"a share of {self.share} and an error of {self.error} of the last run: delete the file")

    def words(self) -> str:
        return f"read {100 * self.share:.0f} % of the keys, error {self.error:.2g}, in {self.steps} computed steps"


LAST_FILES = CalibrationFiles(
    kind=LastRun,
    what="a last run",
    format="wancore-sparse-last/1",
    suffix=".bound.json",
    digits={"share": 4, "error": 5},
)


def read_last(checkpoint: Path | None, task: str, expert: str, options: SparseOptions) -> LastRun | None:
    """The last run with the weights of `checkpoint` and the same bound, if it is known. A file that cannot be read
    counts as none: nothing depends on it."""
    path = None if checkpoint is None else LAST_FILES.beside(checkpoint, f"{task}.{expert}")
    if path is None or not path.is_file():
        return None
    with suppress(OptionError, OSError):
        last = LAST_FILES.read(path)
        return last if (last.expert, last.source) == (expert, sparse_words(options)) else None
    return None


def write_last(
    task: str,
    options: SparseOptions | None,
    files: Mapping[Expert, Path | None],
    attention: Sequence[Mapping[str, Any]],
) -> None:
    """Keep what a run took beside the files of its experts. attention: as in the report."""
    for expert, file in files.items():
        steps = [step for step in attention if step["expert"] == expert]
        if file is None or not steps or options is None or is_embedded(file):
            continue
        shares = [share for step in steps for share in step["shares"]]
        errors = [error or 0.0 for step in steps for error in step["errors"]]
        last = LastRun(
            task=task,
            source=sparse_words(options),
            expert=expert,
            steps=len(steps),
            share=sum(shares) / len(shares),
            error=sum(errors) / len(errors),
        )
        with suppress(OSError, OptionError):  # a folder that is read-only, numbers that are not finite
            LAST_FILES.write(last, LAST_FILES.beside(file, f"{task}.{expert}"))
