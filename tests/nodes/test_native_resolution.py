"""The resolution schedule on ComfyUI's own Wan models, in a real ComfyUI's process on a CPU: `native_resolutions` has
the checks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.comfyui import QUIET, find_newer_comfyui, python_of

pytestmark = pytest.mark.comfy
CHECKS = ("full_size", "engine", "variants", "together", "sparse", "reuse", "shown")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    checkout, script = find_newer_comfyui(), Path(__file__).with_name("native_resolutions.py")
    command = [python_of(checkout), str(script), str(checkout)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **QUIET}, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_resolution_schedule(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]
