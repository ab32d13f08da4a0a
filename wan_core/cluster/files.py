"""Files of a request on the nodes of a cluster: pictures, videos and sound travel, models must be there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wan_core.config import OptionError, Request
from wan_core.config.checks import check_file_size
from wan_core.config.keys import MODEL_PATHS, is_path
from wan_core.config.limits import MAX_VIDEO_FILE
from wan_core.config.outputs import write_bytes
from wan_core.config.table import table

MODELS = "WANCORE_CLUSTER_MODELS"  # HERE=THERE: models below the folder HERE are below THERE on the nodes


def models_there(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of loading, or of one part, with the paths that the nodes have. Raises OptionError."""
    here, equals, there = os.environ.get(MODELS, "").partition("=")
    if here and not (equals and there):
        raise OptionError(f"{MODELS} is {here!r}; write FOLDER_HERE=FOLDER_ON_THE_NODES")

    def moved(path: Any) -> Any:
        full = os.path.abspath(path) if isinstance(path, str) and here and is_path(path) else ""
        below = os.path.join(os.path.abspath(here), "") if here else ""
        return os.path.join(there, full.removeprefix(below)) if full.startswith(below) and below else path

    found = {name: moved(value) if name in MODEL_PATHS else value for name, value in options.items()}
    if found.get("loras"):
        found["loras"] = tuple({**lora, "path": moved(lora["path"])} for lora in found["loras"])
    return found


MEDIA_PATHS = tuple(name for name, one in table(Request).items() if one.path)
NAMING = (*MEDIA_PATHS, "keyframes", "video")  # what has paths in a request and in settings (`video`: --from-video)


def missing(paths: Sequence[str]) -> list[str]:
    return [path for path in dict.fromkeys(paths) if not os.path.exists(path)]


def media_of(request: Mapping[str, Any]) -> dict[str, bytes]:
    """The contents of the files that a request names, by path. Raises OptionError."""
    media: dict[str, bytes] = {}
    total = 0
    paths = [request.get(name) for name in MEDIA_PATHS]
    paths += [one["path"] for one in request.get("keyframes") or ()]
    for path in paths:
        if path is None or path in media or not os.path.lexists(path):
            continue
        try:
            check_file_size(path, MAX_VIDEO_FILE)
            total += os.path.getsize(path)
            if total > MAX_VIDEO_FILE:
                raise OptionError(f"its files have more than {MAX_VIDEO_FILE} bytes, too many to be sent to a node")
            media[path] = Path(path).read_bytes()
        except OSError as fault:
            raise OptionError(f"cannot read {path}: {fault.strerror}") from fault
    return media


def put(media: Mapping[str, bytes], folder: str | Path) -> dict[str, str]:
    """Write another host's files, each content once, into a folder: their paths there -> those here. Raises OSError."""
    here: dict[str, str] = {}
    for path, content in media.items():
        place = Path(folder, hashlib.sha256(content).hexdigest()[:16] + Path(path).suffix)
        if not place.exists():
            write_bytes(place, content)
        here[path] = str(place)
    return here


def with_paths(request: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A request, or the settings of a report, with the paths of its media replaced by what `names` has for them; texts
    are never paths, whatever they say."""
    return {name: _replaced(value, names) if name in NAMING else value for name, value in request.items()}


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    """A path; the `path` of each of several objects; or paths by their frames."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, Mapping):
        return {key: names.get(path, path) for key, path in value.items()}
    if isinstance(value, (list, tuple)):
        return [{**one, "path": names.get(one["path"], one["path"])} for one in value]
    return value


def with_words(text: str, here: Mapping[str, str]) -> str:
    """A message of a node with the paths that the user knows. here: as `put` returns it."""
    for path, place in here.items():
        text = text.replace(place, path)
    return text
