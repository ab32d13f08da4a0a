"""MagCache's curves of magnitudes, and their files: JSON with a `format` and the fields of `Curve`. Without torch.

For each step t and branch a curve holds the mean over tokens of ||residual_t|| / ||residual_(t-1)||, measured once per
model (`python -m wan_core calibrate`); it depends little on the prompt. At the change of expert the ratio compares two
different models and has no meaning (0.655 for text-to-video A14B). Published curves are in `assets/curves`, a
calibrated one lies beside its checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from wan_core.config.checks import OptionError, check_file_size
from wan_core.config.durable import SEAL, UNSEALED, DamagedFile, check_seal
from wan_core.config.limits import MAX_JSON
from wan_core.config.outputs import written_sealed
from wan_core.models.wan.families import find_task

ASSETS = Path(__file__).parents[2] / "assets"
PUBLISHED = ASSETS / "curves"
FORMAT, SUFFIX = "wancore-magcache-curve/1", ".magcache.json"
DIGITS = 5  # of ratios in a file
# Only these known endings are removed: the dot of "wan2.2_t2v_high" is part of the name.
_ENDINGS = (".index.json", ".safetensors", ".gguf", ".pth")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """`cond` and `uncond` hold a ratio for every step; the first ratio of each expert has no meaning. `high_steps` is
    the number of steps of the high-noise expert; with one model, of all steps. source: where the numbers come from, as
    text. Raises OptionError."""

    task: str
    source: str
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


def write_curve(curve: Curve, path: Path) -> Path:
    ratios = {name: [round(one, DIGITS) for one in getattr(curve, name)] for name in ("cond", "uncond")}
    fields = {"format": FORMAT, SEAL: UNSEALED, **asdict(curve), **ratios}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    with written_sealed(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def read_curve(path: Path, tasks: Sequence[str] = ()) -> Curve:
    """Raises OptionError if `path` is no such file, is not as it was written, or was measured for none of `tasks`, if
    there are some; the last of them is the model's. A file without a checksum came with this package, or was written by
    hand."""
    try:
        check_file_size(path, MAX_JSON)
        sealed = check_seal(path)
        fields = json.loads(path.read_text())
        if sealed:
            del fields[SEAL]
        if fields.pop("format", None) != FORMAT:
            raise OptionError(f"{path} is not a MagCache curve of the form {FORMAT}: calibrate it again")
        kinds = get_type_hints(Curve)
        curve = Curve(**{name: typed(kinds.get(name, object), name, one) for name, one in fields.items()})
    except DamagedFile as fault:
        raise OptionError(
            f"{fault}. Calibrate it again, or delete it; if you changed it yourself, take its line {SEAL!r} out"
        ) from fault
    except OptionError:
        raise
    except OSError as fault:
        raise OptionError(f"cannot read {path} ({fault.strerror}): calibrate it again, or delete it") from fault
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as fault:
        raise OptionError(f"{path} is not a MagCache curve ({fault}): calibrate it again, or delete it") from fault
    if tasks and curve.task not in tasks:
        raise OptionError(
            f"{path} is a MagCache curve of {curve.task}, and the model is {tasks[-1]}: calibrate it again, or move "
            "the file away"
        )
    return curve


def typed(kind: Any, name: str, value: Any) -> Any:
    """A `value` of JSON for a field of type `kind`: lists become tuples. Raises TypeError or OverflowError."""
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(typed(get_args(kind)[0], name, one) for one in value)
    kinds = (int, float) if kind is float else get_args(kind) or kind
    if get_origin(kind) is tuple or isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} is {value!r}"[:100])
    if kind is float and not isfinite(value):
        raise TypeError(f"{name} is {value!r}"[:100])
    return float(value) if kind is float else value


def curve_name(task: str, image: bool) -> str:
    """The task's name in a curve: TI2V has one curve for videos that start from an image and one for the others."""
    return f"{task}-image" if image and find_task(task).image == "first frame" else task


def curve_path(checkpoint: Path, task: str, *, image: bool = False) -> Path:
    """The path of the curve beside the file, or in the folder, of the high-noise expert or only transformer.

    image: the video starts from an image (TI2V)."""
    name = curve_name(task, image)
    if checkpoint.is_dir():
        return checkpoint / f"{name}{SUFFIX}"
    stem = checkpoint.name
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    return checkpoint.with_name(f"{stem}{name.removeprefix(task)}{SUFFIX}")


def find_curve(checkpoint: Path | None, task: str, *, image: bool = False) -> Curve | None:
    """The curve beside a checkpoint, else the one of its task in this package, else None.

    image: TI2V starts from an image; the curve for that case is preferred, the one without an image second. Raises
    OptionError for what is no file, for a file that is damaged, or measured for another task.
    """
    names = tuple(dict.fromkeys((curve_name(task, image), task)))
    places: list[Path] = []
    if checkpoint is not None:
        places += [curve_path(checkpoint, task, image=n != task) for n in names]
        places += [checkpoint.parent / f"{n}{SUFFIX}" for n in names]
    places += [*(PUBLISHED / f"{n}.json" for n in names), ASSETS / "tiny" / f"{task}{SUFFIX}"]
    path = next(filter(os.path.lexists, places), None)
    return None if path is None else read_curve(path, names)
