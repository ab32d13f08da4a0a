"""Whether an optional library can be imported here: a sentence where it cannot, never an exception.

Compiled libraries fail in many ways when they meet another torch, CUDA or Python than they were built for. All of
those arrive at import time, and what a user needs from each is the same: which library, why, and what to install.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

# What importing a library that does not fit this machine has been seen to raise: a missing symbol (ImportError), a
# missing .so (OSError), an operator registered twice or a CUDA mismatch (RuntimeError), a torch that lacks a name
# (AttributeError), another numpy (ValueError, TypeError), a Python too old for the syntax, a check of its own.
IMPORT_FAULTS = (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError, SyntaxError, AssertionError)


@dataclass(frozen=True)
class Library:
    """`name` for people, the `attribute` (dotted) of `module` that we call, and how to `install` it. `before`: what is
    to be done before it is imported."""

    name: str
    module: str
    attribute: str
    install: str
    before: Callable[[], None] | None = None

    def why_not(self) -> str | None:
        """None where it can be imported, else why not, and what to do. Imports once per process: some take seconds."""
        with _importing:
            return _probed(self)


def probe(library: Library) -> str | None:
    """Import `library` and look up what we call. None if that works, else a sentence."""
    try:
        if library.before is not None:
            library.before()
        loaded = importlib.import_module(library.module)
        for part in library.attribute.split("."):  # some libraries import what belongs to a name when it is asked for
            loaded = getattr(loaded, part, None)
    except IMPORT_FAULTS as fault:
        if isinstance(fault, ModuleNotFoundError) and f"{library.module}.".startswith(f"{fault.name}."):
            return f"{library.name} is not installed: {library.install}"
        reason = (str(fault).splitlines() or ["no message"])[0]
        return (
            f"{library.name} is installed but cannot be imported ({type(fault).__name__}: {reason}); install a build "
            f"for this torch: {library.install}"
        )
    if loaded is None:
        return f"{library.name} is too old or incomplete, it has no {library.attribute}: {library.install}"
    return None


def load_torchs_cudnn() -> None:
    """Load all of the cuDNN that came with torch, before a library that would load the system's beside it.

    Transformer Engine names cuDNN's parts without saying where they are. torch loads them when it first needs them;
    what is not loaded by then comes from the system, and parts of two versions do not work together (an undefined
    symbol).
    Nothing to do where torch uses the system's own.
    """
    folder = Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib"
    for part in sorted(folder.glob("libcudnn*.so.*")):
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)


_importing = threading.Lock()  # two threads that import parts of one library can each see the other's half-made modules


_probed = functools.cache(probe)
