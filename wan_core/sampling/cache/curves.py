"""Curves of MagCache: how the magnitude of a model's residual changes from step to step, per branch.

The residual is what all blocks together add to the tokens. A curve holds for each step t the mean over tokens of
||residual_t|| / ||residual_(t-1)||, measured once for a model (`python -m wan_core calibrate`). It is nearly the same
for every prompt: Ma et al., "MagCache", 2025, arXiv:2506.09045. Where the expert changes, the ratio compares two models
and means nothing (0.655 for text-to-video A14B): `for_plan` leaves it out.

A curve is a small JSON file: the published ones are in `assets/curves`, one that was calibrated lies beside its
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from wan_core.config import OptionError
from wan_core.models.wan.tasks import find_task
from wan_core.sampling.plan import Branch, Expert, Plan

ASSETS = Path(__file__).parents[2] / "assets"
PUBLISHED = ASSETS / "curves"
FORMAT = "wancore-magcache-curve/1"
SUFFIX = ".magcache.json"
# Only what a checkpoint's name is known to end with is cut off: the dot of "wan2.2_t2v_high" is part of a name.
_ENDINGS = (".index.json", ".safetensors", ".gguf", ".pth")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """`cond` and `uncond` have a ratio for every step; the first of a phase has no meaning. `high_steps`: how many of
    the steps are the high-noise expert's (all, where one model runs every step)."""

    task: str
    source: str  # where it comes from, in words
    high_steps: int
    shift: float
    boundary: float
    solver: str
    samples: int | None  # videos that were measured; None: not known
    cond: tuple[float, ...]
    uncond: tuple[float, ...]

    def __post_init__(self) -> None:
        ratios = (*self.cond, *self.uncond)
        fits = len(self.cond) == len(self.uncond) and 0 <= self.high_steps <= len(self.cond)
        if not fits or len(self.cond) < 2 or not all(isfinite(r) and r > 0 for r in ratios):
            raise OptionError(
                f"the MagCache curve of {self.task} has {len(self.cond)} and {len(self.uncond)} ratios, "
                f"{self.high_steps} of them high-noise; it needs as many of both branches, each above 0: calibrate it"
            )

    @property
    def steps(self) -> int:
        return len(self.cond)

    def phase(self, expert: Expert, branch: Branch) -> tuple[float, ...]:
        """The ratios between the steps of one expert: one fewer than it has steps."""
        ratios = getattr(self, branch)
        return ratios[1 : self.high_steps] if expert == "high" else ratios[self.high_steps + 1 :]

    def for_plan(self, plan: Plan) -> dict[Branch, tuple[float | None, ...]]:
        """A ratio for every step of `plan`, each phase resampled from its own expert's; None at the first step of a
        phase, and throughout the phase of an expert whose ratios are not known."""
        found: dict[Branch, tuple[float | None, ...]] = {}
        for branch in ("cond", "uncond"):
            ratios: list[float | None] = []
            for steps in plan.phases:
                known = self.phase(steps[0].expert, branch)
                count = len(steps) - 1
                ratios += [None, *(nearest(known, count) if known else [None] * count)]
            found[branch] = tuple(ratios)
        return found


def nearest(values: Sequence[float], count: int) -> list[float]:
    """`values` resampled to `count` of them, ends on ends: index round(i * (len - 1) / (count - 1))."""
    last = len(values) - 1
    if count < 2:
        return list(values[-count:]) if count else []
    return [values[round(i * last / (count - 1))] for i in range(count)]


# --------------------------------------------------------------------------------------------------------------- files


def write_curve(curve: Curve, path: Path) -> Path:
    rounded = {k: [round(r, 5) for r in v] if isinstance(v, tuple) else v for k, v in asdict(curve).items()}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in {"format": FORMAT, **rounded}.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def read_curve(path: Path) -> Curve:
    """Raises OptionError for a file that is no curve."""
    try:
        found = json.loads(path.read_text())
        if found.pop("format", None) != FORMAT:
            raise OptionError(f"{path} is not a MagCache curve of the form {FORMAT}: calibrate it again")
        return Curve(**_checked(found))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as fault:
        if isinstance(fault, OptionError):
            raise
        raise OptionError(f"{path} is not a MagCache curve ({fault}): calibrate it again, or delete it") from fault


def _checked(found: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a curve as they were read, each of its own type. Raises TypeError or OverflowError."""
    values: dict[str, Any] = dict(found)
    for name in ("cond", "uncond"):
        values[name] = tuple(_number(name, ratio) for ratio in values.get(name, ()))
    for name in ("shift", "boundary"):
        values[name] = _number(name, values.get(name))
    wanted = {"task": str, "source": str, "solver": str, "high_steps": int, "samples": (int, type(None))}
    for name, kind in wanted.items():
        if name not in values or not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise TypeError(f"{name} is {values.get(name)!r}"[:100])
    return values


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value):
        raise TypeError(f"{name} holds {value!r}"[:100])
    return float(value)


def curve_name(task: str, image: bool) -> str:
    """What a curve calls its task: a model that may start from an image (TI2V) has one curve with and one without."""
    return f"{task}-image" if image and find_task(task).image == "first frame" else task


def curve_path(checkpoint: Path, task: str, *, image: bool = False) -> Path:
    """Where a curve for the high-noise expert's (or only) file or folder is written. image: TI2V starts from one."""
    name = curve_name(task, image)
    if checkpoint.is_dir():
        return checkpoint / f"{name}{SUFFIX}"
    stem = checkpoint.name
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    return checkpoint.with_name(f"{stem}{name.removeprefix(task)}{SUFFIX}")


def is_embedded(checkpoint: Path) -> bool:
    """Whether a checkpoint is one that comes with this project, and so does its curve: nothing is written there."""
    return ASSETS in checkpoint.absolute().parents


def find_curve(checkpoint: Path | None, task: str, *, image: bool = False) -> Curve | None:
    """The curve beside a checkpoint, else the one of its task that comes with this project, else None.

    image: TI2V is conditioned on an image, which has curves of its own; those without are the second choice. Raises
    OptionError for a file that is damaged or of another task.
    """
    names = tuple(dict.fromkeys((curve_name(task, image), task)))
    places: list[Path] = []
    if checkpoint is not None:
        places += [curve_path(checkpoint, task, image=n != task) for n in names]
        places += [checkpoint.parent / f"{n}{SUFFIX}" for n in names]
    places += [*(PUBLISHED / f"{n}.json" for n in names), ASSETS / "tiny" / f"{task}{SUFFIX}"]
    for path in places:
        if path.is_file():
            curve = read_curve(path)
            if curve.task not in names:
                raise OptionError(
                    f"{path} is a MagCache curve of {curve.task}, and the model is {task}: calibrate it again, or move "
                    "the file away"
                )
            return curve
    return None


def published_curves() -> Mapping[str, Curve]:
    return {path.stem: read_curve(path) for path in sorted(PUBLISHED.glob("*.json"))}
