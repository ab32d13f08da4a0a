"""Whether files have changed since they were read: their names, sizes and times of change."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

from wan_core.config.outputs import model_files

P = ParamSpec("P")
T = TypeVar("T")
Stamps = tuple[tuple[str, int, int], ...]


def stamps(paths: Iterable[str | os.PathLike[str]]) -> Stamps:
    """Name, size and time of change of each file behind `paths`, those of a model's folder or index among them. They
    differ when a file was replaced under its old name. What does not exist has none."""
    found = sorted({f for path in map(Path, paths) if path.exists() for f in model_files(path) if f.is_file()})
    return tuple((str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in found)


def until_changed(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For a function whose texts and paths name files that it reads: what it returned is kept until one of them
    changes, for the newest `most` calls. What it raises is not kept."""

    def keep(read: Callable[P, T]) -> Callable[P, T]:
        @functools.lru_cache(most)
        def kept(files: object, *given: P.args, **named: P.kwargs) -> T:
            return read(*given, **named)

        @functools.wraps(read)
        def newest(*given: P.args, **named: P.kwargs) -> T:
            return kept(stamps(one for one in given if isinstance(one, (str, os.PathLike))), *given, **named)

        return newest

    return keep
