"""Curves of MagCache: how the magnitude of a model's residual changes from step to step, per branch.

The residual is the sum that all blocks add to the tokens. For each step t a curve holds the mean over tokens of
||residual_t|| / ||residual_(t-1)||, measured once per model (`python -m wan_core calibrate`). It depends little on the
prompt: Ma et al., "MagCache", 2025, arXiv:2506.09045. At the change of expert the ratio compares two different models
and has no meaning (0.655 for text-to-video A14B): `for_plan` gives None there.

A curve is a small JSON file. Published curves are in `assets/curves`, a calibrated one lies beside its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from wan_core.config import OptionError
from wan_core.models.wan.families import find_task
from wan_core.sampling.calibration_files import ASSETS, CalibrationFiles, Measured
from wan_core.sampling.plan import Branch, Expert, Plan

PUBLISHED = ASSETS / "curves"


@dataclass(frozen=True, kw_only=True)
class Curve(Measured):
    """`cond` and `uncond` hold a ratio for every step; the first ratio of each expert has no meaning. `high_steps` is
    the number of steps of the high-noise expert; with one model, of all steps. Raises OptionError."""

    high_steps: int
    shift: float
    boundary: float
    solver: str
    samples: int | None  # number of videos measured; None: unknown
    cond: tuple[float, ...]
    uncond: tuple[float, ...]

    def __post_init__(self) -> None:
        ratios = (*self.cond, *self.uncond)
        fits = len(self.cond) == len(self.uncond) and 0 <= self.high_steps <= len(self.cond)
        if not fits or len(self.cond) < 2 or not all(isfinite(r) and r > 0 for r in ratios):
            raise OptionError(
                f"the MagCache curve of {self.task} has {len(self.cond)} and {len(self.uncond)} ratios, "
                f"{self.high_steps} of them high-noise; both branches need the same number, each above 0: calibrate it"
            )

    @property
    def steps(self) -> int:
        return len(self.cond)

    def phase(self, expert: Expert, branch: Branch) -> tuple[float, ...]:
        """The ratios between consecutive steps of one expert: one fewer than its steps."""
        ratios = getattr(self, branch)
        return ratios[1 : self.high_steps] if expert == "high" else ratios[self.high_steps + 1 :]

    def for_plan(self, plan: Plan) -> dict[Branch, tuple[float | None, ...]]:
        """A ratio for every step of `plan`, resampled within each expert. None at the first step of an expert, and for
        all steps of an expert without ratios."""
        resampled: dict[Branch, tuple[float | None, ...]] = {}
        for branch in ("cond", "uncond"):
            ratios: list[float | None] = []
            for steps in plan.steps_of_experts:
                curve = self.phase(steps[0].expert, branch)
                count = len(steps) - 1
                ratios += [None, *(nearest(curve, count) if curve else [None] * count)]
            resampled[branch] = tuple(ratios)
        return resampled


def nearest(values: Sequence[float], count: int) -> list[float]:
    """`values` resampled to `count` values, first and last kept: index round(i * (len - 1) / (count - 1))."""
    last = len(values) - 1
    if count < 2:
        return list(values[-count:]) if count else []
    return [values[round(i * last / (count - 1))] for i in range(count)]


# --------------------------------------------------------------------------------------------------------------- files

CURVE_FILES = CalibrationFiles(
    kind=Curve,
    what="a MagCache curve",
    format="wancore-magcache-curve/1",
    suffix=".magcache.json",
    digits={"cond": 5, "uncond": 5},
)


def curve_name(task: str, image: bool) -> str:
    """The task's name in a curve: TI2V has one curve for videos that start from an image and one for the others."""
    return f"{task}-image" if image and find_task(task).image == "first frame" else task


def curve_path(checkpoint: Path, task: str, *, image: bool = False) -> Path:
    """The path of the curve for the file or folder of the high-noise expert or only transformer.

    image: the video starts from an image (TI2V)."""
    name = curve_name(task, image)
    return CURVE_FILES.beside(checkpoint, name, name.removeprefix(task))


def find_curve(checkpoint: Path | None, task: str, *, image: bool = False) -> Curve | None:
    """The curve beside a checkpoint, else the one of its task in this package, else None.

    image: TI2V starts from an image; the curve for that case is preferred, the one without an image second. Raises
    OptionError for a file that is damaged or measured for another task.
    """
    names = tuple(dict.fromkeys((curve_name(task, image), task)))
    places: list[Path] = []
    if checkpoint is not None:
        places += [curve_path(checkpoint, task, image=n != task) for n in names]
        places += [checkpoint.parent / f"{n}{CURVE_FILES.suffix}" for n in names]
    places += [*(PUBLISHED / f"{n}.json" for n in names), ASSETS / "tiny" / f"{task}{CURVE_FILES.suffix}"]
    path = next((path for path in places if path.is_file()), None)
    return None if path is None else CURVE_FILES.read(path, names)
