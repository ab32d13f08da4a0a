"""Files of what was measured on a model: JSON with a `format` and the fields of a dataclass. Without torch.

They lie beside the checkpoint that they were measured on: MagCache's curves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from wan_core.config.checks import OptionError, check_file_size
from wan_core.config.durable import SEAL, UNSEALED, DamagedFile, check_seal
from wan_core.config.limits import MAX_JSON
from wan_core.config.outputs import written_sealed

# Only these known endings are removed: the dot of "wan2.2_t2v_high" is part of the name.
_ENDINGS = (".index.json", ".safetensors", ".gguf", ".pth")
ASSETS = Path(__file__).parents[1] / "assets"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """task: of the model. source: where the numbers come from, as text."""

    task: str
    source: str


T = TypeVar("T", bound=Measured)


@dataclass(frozen=True, kw_only=True)
class CalibrationFiles(Generic[T]):
    """The files of one kind of `Measured`. what: what messages call one. digits: how numbers of a field are rounded."""

    kind: type[T]
    what: str
    format: str
    suffix: str
    digits: Mapping[str, int]

    def beside(self, checkpoint: Path, name: str, ending: str = "") -> Path:
        """The path beside a checkpoint file, `ending` behind its name; of a folder the one of that `name` in it."""
        if checkpoint.is_dir():
            return checkpoint / f"{name}{self.suffix}"
        stem = checkpoint.name
        for known_ending in _ENDINGS:
            stem = stem.removesuffix(known_ending)
        return checkpoint.with_name(f"{stem}{ending}{self.suffix}")

    def write(self, measured: T, path: Path) -> Path:
        fields = {name: rounded(value, self.digits.get(name)) for name, value in asdict(measured).items()}
        fields = {"format": self.format, SEAL: UNSEALED, **fields}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        with written_sealed(path) as temporary:
            temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return path

    def read(self, path: Path, tasks: Sequence[str] = ()) -> T:
        """Raises OptionError if `path` is no such file, is not as it was written, or was measured for none of `tasks`,
        if there are some; the last of them is the model's. A file without a checksum came with this package, or was
        written by hand."""
        try:
            check_file_size(path, MAX_JSON)
            sealed = check_seal(path)
            fields = json.loads(path.read_text())
            if sealed:
                del fields[SEAL]
            if fields.pop("format", None) != self.format:
                raise OptionError(f"{path} is not {self.what} of the form {self.format}: calibrate it again")
            kinds = get_type_hints(self.kind)
            measured = self.kind(**{name: typed(kinds.get(name, object), name, one) for name, one in fields.items()})
        except DamagedFile as fault:
            raise OptionError(
                f"{fault}. Calibrate it again, or delete it; if you changed it yourself, take its line {SEAL!r} out"
            ) from fault
        except OptionError:
            raise
        except OSError as fault:
            raise OptionError(f"cannot read {path} ({fault.strerror}): calibrate it again, or delete it") from fault
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as fault:
            raise OptionError(f"{path} is not {self.what} ({fault}): calibrate it again, or delete it") from fault
        if tasks and measured.task not in tasks:
            raise OptionError(
                f"{path} is {self.what} of {measured.task}, and the model is {tasks[-1]}: calibrate it again, or move "
                "the file away"
            )
        return measured


def is_embedded(checkpoint: Path) -> bool:
    """Whether a checkpoint is part of this package: nothing is written there."""
    return ASSETS in checkpoint.absolute().parents


def rounded(value: Any, digits: int | None) -> Any:
    """A number, or the numbers in tuples, to so many digits; None: as it is."""
    if digits is None:
        return value
    return [rounded(one, digits) for one in value] if isinstance(value, tuple) else round(value, digits)


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
