"""WanCore Accelerate and step caching on ComfyUI's own Wan models, in a real ComfyUI's process on a CPU: `MODULES`
have the checks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.comfyui import find_newer_comfyui, printed_by

pytestmark = pytest.mark.comfy
HERE = Path(__file__).parent
MODULES = ("native_beside", "native_caches", "native_odd_runs", "native_passes")
CHECKS = [(name, check) for name in MODULES
          for check in re.findall(r"^def check_(\w+)", (HERE / f"{name}.py").read_text(), re.MULTILINE)]  # fmt: skip


@cache
def faults(module: str) -> dict[str, str]:
    return printed_by("native_checks.py", find_newer_comfyui(), module)


@pytest.mark.parametrize(("module", "check"), CHECKS)
def test_native(module: str, check: str) -> None:
    assert not faults(module)[check], faults(module)[check]
