"""Importing, made quicker. torch, its compiler and an attention library are 3,000 sources, and a start is mostly them.

Python compiles each source once and keeps the result beside it, as far as it may: not in images that forbid it
(`PYTHONDONTWRITEBYTECODE` stands in many) or where that folder cannot be written. It compiles them all at every start
then, which takes longer than running them. There, processes of this package keep the result in their own cache folder.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from wan_core.folders import cache_folder

FORBIDS, PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
FOLDER = "bytecode"  # in the cache folder
OFTEN = gc.get_threshold()
SELDOM = (50_000, 20, 100)  # garbage among so many new objects is looked for: modules are none, and a fifth of the time
OLDEST = 86400 * 365  # seconds since 1970; Python tells by its date whether a source has changed, and some have none


def quicken() -> None:
    """Make imports of this process quicker, and of those it starts. To be called before torch is imported: a program
    that has imported it is another's, and is left alone."""
    if "torch" in sys.modules:
        return
    gc.set_threshold(*SELDOM)
    if settings := environment():
        os.environ.update(settings)
        sys.pycache_prefix, sys.dont_write_bytecode = settings[PREFIX], False


def done() -> None:
    """After `quicken`, when all has been imported and no weights have been read: garbage is looked for as often as
    before, and never among what was imported, which stays."""
    if gc.get_threshold() == SELDOM:
        gc.freeze()
        gc.set_threshold(*OFTEN)


def environment() -> dict[str, str]:
    """What to set for a process that is started, so that it keeps bytecode; nothing where Python does by itself."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    kept = Path(importlib.util.cache_from_source(spec.origin))
    if kept.is_file() or (not sys.dont_write_bytecode and _may_be_written(kept.parent)):
        return {}
    if os.stat(spec.origin).st_mtime < OLDEST:
        return {}
    try:
        of = f"{sys.implementation.cache_tag}-torch-{version('torch')}"
    except PackageNotFoundError:
        return {}
    return {PREFIX: str(cache_folder() / FOLDER / of), FORBIDS: ""}


def forgotten(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as it was before `quicken`, in effect: nothing is found or kept."""
    found = dict(environment)
    if Path(found.get(PREFIX, "")).is_relative_to(cache_folder() / FOLDER):
        del found[PREFIX]
        found[FORBIDS] = "1"
    return found


def describe() -> str:
    """What is kept, for people."""
    spec = importlib.util.find_spec("torch")
    kept = None if spec is None or spec.origin is None else Path(importlib.util.cache_from_source(spec.origin))
    advice = f"unset {FORBIDS} where it is set, or set {PREFIX} to a folder that may be written"
    if kept is None or not kept.is_file():
        return f"not kept: Python compiles the sources of torch at every start, which takes seconds; {advice}"
    if sys.pycache_prefix and Path(sys.pycache_prefix).is_relative_to(cache_folder() / FOLDER):
        return f"kept in {sys.pycache_prefix}, for this command line and its workers. ComfyUI has none: {advice}"
    return "kept"


def _may_be_written(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)
