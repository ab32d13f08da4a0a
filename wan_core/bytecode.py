"""Whether Python finds its libraries compiled: it needs seconds to compile the sources of torch and what torch imports,
and does so at every start where the result is kept nowhere, as in many container images."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

FORBIDS, PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def why_none() -> str | None:
    """None where torch's bytecode is kept; else what that costs, and what to do."""
    if Path(importlib.util.cache_from_source(torch.__file__)).is_file():
        return None
    return (
        "not kept: Python compiles the sources of torch at every start, which takes seconds. Unset "
        f"{FORBIDS} where it is set, and set {PREFIX} to a folder that may be written, or run "
        "`python -m compileall` on the folder of the packages"
    )
