"""The key of a video: equal where the same video is asked for, so that what is finished of it is not made again.

It is made of every option that is declared; those that change no number of the video are named here (`SAME_RESULT`). A
field is in a key only where it is not at its default: a new one needs nothing here, and keys of older lists stay.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from wan_core.config.changes import until_changed
from wan_core.config.checks import OptionError, check_file_size
from wan_core.config.limits import MAX_VIDEO_FILE
from wan_core.config.loading import LoadOptions
from wan_core.config.request import Request
from wan_core.config.table import stated, table

SAME_RESULT = ("device", "residency", "resident_blocks", "memory_limit", "host_memory_limit")  # options of loading
MODEL_PATHS = ("path", *(name for name, one in table(LoadOptions).items() if one.path))  # options that name models


def in_keys(loaded: LoadOptions) -> dict[str, Any]:
    """What all keys of a list have of its options of loading."""
    return {name: value for name, value in in_key(loaded).items() if name not in SAME_RESULT}


def key_of(request: Request, loaded: LoadOptions, models: Mapping[str, Any] | None = None) -> str:
    """Equal where the same video is asked for, of pictures and videos with the same contents. models: `in_keys(loaded)`
    where many keys are made."""
    asked, models = in_key(request), in_keys(loaded) if models is None else models
    files = [name for name, one in table(Request).items() if one.path and asked.get(name) is not None]
    media: list[Any] = [contents(Path(asked[name])) for name in files]
    media += [[one.frame, contents(Path(one.path))] for one in request.keyframes or ()]
    asked.pop("keyframes", None)
    text = json.dumps([asked, models, *media], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def in_key(value: Any) -> Any:
    """What a key has of a value of an option."""
    if isinstance(value, tuple | list):
        return [in_key(one) for one in value]
    if not is_dataclass(value):
        return value
    return {name: in_key(one) for name, one in stated(value).items()}


def contents(path: Path) -> str:
    """A hash of what a picture or video holds; "" for one that cannot be read or is too large, which the check of the
    request says."""
    try:
        check_file_size(path, MAX_VIDEO_FILE)
        return _hash(path)
    except (OSError, OptionError):
        return ""


@until_changed(10_000)  # a list names one many times
def _hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def model_paths(options: Mapping[str, Any]) -> list[str]:
    """The files and folders that options of loading, or of one part, name."""
    named = [options.get(name) for name in MODEL_PATHS] + [lora["path"] for lora in options.get("loras") or ()]
    return [path for path in named if path is not None and is_path(path)]


def is_path(model: str) -> bool:
    """Whether an option that names models names a file or folder, and no models that need none."""
    return model != "tiny" and not str(model).startswith("random:")
