"""Speed presets: settings (step cache, sparse attention, guidance) under one name, in the words of `quality --setting`.

`BOUNDS` state errors that every run keeps on the weights at hand. docs/sparse.md has what they keep of the video on all
judges. Others were found by a search: JSON files `NAME.preset.json` with what they were measured to do. Those of this
package are in `assets/presets`, measured on the embedded model; `python -m wan_core search` writes others, of a user's
own model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from wan_core.config import OptionError
from wan_core.config.checks import check_file_size, meant_hint
from wan_core.config.command import command
from wan_core.config.limits import MAX_JSON

FORMAT = "wancore-preset/1"
SUFFIX = ".preset.json"
FOLDER = Path(__file__).parents[1] / "assets" / "presets"
AGAIN = "search it again, or choose another"
BOUNDS = {
    "faithful": "sparse:bound:0.005:slope:error+adaptive:bound:0.1",
    "balanced": "sparse:bound:0.06:slope:error+adaptive:bound:0.4",
    "fast": "sparse:bound:0.12:slope:error+adaptive:bound:0.8",
}
# Names that saved graphs and scripts have: searched presets before bounds took `balanced` and `fast`.
RENAMED = {
    name: f"searched-{name}" for name in ("careful", "careful-i2v", "balanced-i2v", "balanced-i2v-20", "fast-i2v")
}


@dataclass(frozen=True)
class SpeedPreset:
    """`setting` in the words of `quality --setting`; `source`: the model that it was measured on; `steps`: of the runs
    in which it was measured, None where the file does not say."""

    name: str
    setting: str
    source: str
    steps: int | None = None


def speed_names() -> tuple[str, ...]:
    """The presets of this package: bounds, then those that a search found."""
    return (*BOUNDS, *searched_names())


def searched_names() -> tuple[str, ...]:
    return tuple(sorted(path.name.removesuffix(SUFFIX) for path in FOLDER.glob(f"*{SUFFIX}")))


def find_speed(name: str) -> SpeedPreset:
    """The preset of this package with that name, or of the file. Raises OptionError."""
    name = RENAMED.get(name, name)
    if name in BOUNDS:
        return SpeedPreset(name, BOUNDS[name], "bounds that each run keeps")
    if name in searched_names():
        return read_speed(FOLDER / f"{name}{SUFFIX}")
    path = Path(name)
    if not name.endswith(SUFFIX) or not path.is_file():
        raise OptionError(
            f"speed preset {name!r} given; use one of {', '.join(speed_names())}, or an existing file NAME{SUFFIX} "
            f"that `{command('search')}` wrote{meant_hint(name, speed_names())}"
        )
    return read_speed(path)


def read_speed(path: Path) -> SpeedPreset:
    """The preset in a file. Raises OptionError if it is damaged or of another form."""
    try:
        check_file_size(path, MAX_JSON)
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise OptionError(f"{path} is not a preset of the form {FORMAT}: {AGAIN}")
        texts = [fields[name] for name in ("name", "setting", "source")]
        of = fields.get("of", {})
        steps = of.get("steps") if isinstance(of, dict) else of
    except (OSError, ValueError, KeyError, RecursionError) as fault:
        if isinstance(fault, OptionError):
            raise
        raise OptionError(f"{path} is not a preset ({type(fault).__name__}: {fault}): {AGAIN}") from fault
    if not all(isinstance(value, str) and value for value in texts):
        raise OptionError(f"{path} is not a preset: name, setting and source must be words: {AGAIN}")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise OptionError(f"{path} is not a preset: `of.steps` must be a whole number from 1: {AGAIN}")
    return SpeedPreset(*texts, steps=steps)
