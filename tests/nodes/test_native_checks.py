"""The nodes in a real ComfyUI's process on a CPU, on its own Wan models and beside its memory manager: `MODULES` have
the checks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.comfyui import find_comfyui, find_newer_comfyui, printed_by

pytestmark = pytest.mark.comfy
HERE = Path(__file__).parent
ANY_VERSION = ("half_inputs", "motion_phases", "native_objects", "native_texts", "remote_memory")
MODULES = ("native_accelerate", "native_beside", "native_blocks", "native_caches", "native_dynamic", "native_odd_runs",
           "native_passes", "native_reserve", "native_vae", *ANY_VERSION)  # fmt: skip
CHECKS = [(name, check) for name in MODULES
          for check in re.findall(r"^def check_(\w+)", (HERE / f"{name}.py").read_text(), re.MULTILINE)]  # fmt: skip


@cache
def faults(module: str) -> dict[str, str]:
    return printed_by("native_checks.py", find_comfyui() if module in ANY_VERSION else find_newer_comfyui(), module)


@pytest.mark.parametrize(("module", "check"), CHECKS)
def test_native(module: str, check: str) -> None:
    assert not faults(module)[check], faults(module)[check]


@pytest.mark.gpu
def test_native_blocks_by_kernels() -> None:
    assert not any(faults("native_blocks_gpu").values()), faults("native_blocks_gpu")
