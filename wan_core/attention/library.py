"""Whether an optional library can be imported here: a sentence where it cannot, never an exception.

Compiled libraries fail in many ways when they meet another torch, CUDA or Python than they were built for. All of
those arrive at import time, and what a user needs from each is the same: which library, why, and what to install.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

# What importing a library that does not fit this machine has been seen to raise: a missing symbol (ImportError), a
# missing .so (OSError), an operator registered twice or a CUDA mismatch (RuntimeError), a torch that lacks a name
# (AttributeError), another numpy (ValueError, TypeError), a Python too old for the syntax, a check of its own.
IMPORT_FAULTS = (
    ImportError,
    OSError,
    RuntimeError,
    AttributeError,
    ValueError,
    TypeError,
    SyntaxError,
    AssertionError,
)


@dataclass(frozen=True)
class Library:
    """`name` for people, the `attribute` (dotted) of `module` that we call, and how to `install` it."""

    name: str
    module: str
    attribute: str
    install: str

    def why_not(self) -> str | None:
        """None where it can be imported, else the reason and what to do. Imports once per process: some take
        seconds."""
        return _probe_once(self)


def probe(library: Library) -> str | None:
    """Import `library` and look up what we call. None if that works, else a sentence."""
    try:
        with torchs_cudnn():
            found = importlib.import_module(library.module)
    except IMPORT_FAULTS as fault:
        if isinstance(fault, ModuleNotFoundError) and f"{library.module}.".startswith(f"{fault.name}."):
            return f"{library.name} is not installed: {library.install}"
        reason = (str(fault).splitlines() or ["no message"])[0]
        return (
            f"{library.name} is installed but cannot be imported ({type(fault).__name__}: {reason}); install a build "
            f"for this torch: {library.install}"
        )
    for part in library.attribute.split("."):
        found = getattr(found, part, None)
    if found is None:
        return f"{library.name} is too old or incomplete, it has no {library.attribute}: {library.install}"
    return None


@contextmanager
def torchs_cudnn() -> Iterator[None]:
    """What looks for cuDNN inside finds the one that came with torch.

    Transformer Engine takes the system's first, and two versions of cuDNN in one process do not work together ("an
    undefined symbol"). CUDNN_HOME is where it looks before that; one that is set already is respected.
    """
    home = Path(torch.__file__).parents[1] / "nvidia" / "cudnn"
    if "CUDNN_HOME" in os.environ or not home.is_dir():
        yield
        return
    os.environ["CUDNN_HOME"] = str(home)
    try:
        yield
    finally:
        del os.environ["CUDNN_HOME"]


_probe_once = functools.cache(probe)
