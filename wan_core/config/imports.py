"""Importing, made quicker. torch, its compiler and an attention library are 3,000 sources, and a start is mostly them.

Python compiles each source once and keeps the result beside it, as far as it may: not in images that forbid it
(`PYTHONDONTWRITEBYTECODE` stands in many) or where that folder cannot be written. It compiles them all at every start
then, which takes longer than running them. There, processes of this package keep the result in their own cache folder.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path

from wan_core.config.folders import cache_folder

FORBIDS, PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
FOLDER = "bytecode"  # in the cache folder
USED = "used"  # a file in each folder there, with the date of its last use
SELDOM = (50_000, 20, 100)  # garbage among so many new objects is looked for: modules are none
YEAR = 365 * 86400  # seconds
DATED = 11 * YEAR  # since 1970; builds that date all sources alike take 0, 1 or 1980, where zip begins
FORGET = YEAR // 12  # of what was not used
_often: tuple[int, int, int] | None = None  # how garbage was looked for before `quicken`


def quicken() -> None:
    """Make imports of this process quicker, and of those it starts. To be called before torch is imported: a program
    that has imported it is another's, and is left alone."""
    global _often
    if "torch" in sys.modules:
        return
    _often = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    if settings := environment():
        os.environ.update(settings)
        sys.pycache_prefix, sys.dont_write_bytecode = settings[PREFIX], False


def done() -> None:
    """After `quicken`, when all has been imported and no weights have been read: garbage is looked for as often as
    before, and never among what was imported, which stays."""
    global _often
    if _often is not None:
        gc.freeze()
        gc.set_threshold(*_often)
        _often = None


def environment() -> dict[str, str]:
    """What to set for a process that is started, so that it keeps bytecode; nothing where Python does by itself, and
    where neither can. Makes the folder, and forgets others that were not used for a month."""
    spec = _torch()
    try:
        if spec is None or spec.origin is None or _kept(spec):
            return {}
        # Python tells by date and length whether a source has changed. The names of what is installed, versions among
        # them, tell the rest.
        if os.stat(spec.origin).st_mtime < DATED:
            return {}
        packages = Path(spec.origin).parents[1]
        installed = sorted(name for name in os.listdir(packages) if name.endswith((".dist-info", ".egg-info")))
        digest = hashlib.sha256("\n".join([str(packages), *installed]).encode()).hexdigest()[:16]
        folder = cache_folder() / FOLDER / f"{sys.implementation.cache_tag}-{digest}"
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _forget_others(folder)
        (folder / USED).touch()
    except OSError:  # folders that may not be entered or written
        return {}
    return {PREFIX: str(folder), FORBIDS: ""}


def forgotten(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as it was before `quicken`, in effect: nothing is found or kept."""
    found = dict(environment)
    if Path(found.get(PREFIX, "")).is_relative_to(cache_folder() / FOLDER):
        del found[PREFIX]
        found[FORBIDS] = "1"
    return found


def describe() -> str:
    """What is kept, for people."""
    spec = _torch()
    advice = f"unset {FORBIDS} where it is set, or run `python -m compileall` on the folder of the packages"
    if spec is None or spec.origin is None or not os.path.isfile(importlib.util.cache_from_source(spec.origin)):
        return f"not kept: Python compiles the sources of torch at every start, which takes seconds; {advice}"
    if sys.pycache_prefix and Path(sys.pycache_prefix).is_relative_to(cache_folder() / FOLDER):
        return f"kept in {sys.pycache_prefix}, by this command line and for workers. For ComfyUI itself, {advice}"
    return "kept"


def _torch() -> ModuleSpec | None:
    try:
        return importlib.util.find_spec("torch")
    except ValueError:  # something that was put in its place
        return None


def _kept(spec: ModuleSpec) -> bool:
    """Whether Python keeps it, or will."""
    assert spec.origin is not None
    kept = importlib.util.cache_from_source(spec.origin)
    return os.path.isfile(kept) or (not sys.dont_write_bytecode and _may_be_written(Path(kept).parent))


def _may_be_written(folder: Path) -> bool:
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _forget_others(folder: Path) -> None:
    for other in folder.parent.iterdir():
        mark = other / USED
        if other != folder and not (mark.exists() and time.time() - mark.stat().st_mtime < FORGET):
            shutil.rmtree(other, ignore_errors=True)
