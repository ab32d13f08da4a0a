"""Memory of workers under ComfyUI's real memory manager, on a simulated device: `remote_memory` has the checks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.comfyui import QUIET, find_comfyui, python_of

pytestmark = pytest.mark.comfy
CHECKS = (
    "kept_is_given_back", "others_make_room", "held_is_not_asked_for_again", "workers_that_ended_hold_nothing",
    "others_may_end_them",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    checkout, script = find_comfyui(), Path(__file__).with_name("remote_memory.py")
    command = [python_of(checkout), str(script), str(checkout)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **QUIET}, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_memory_of_workers(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


def test_all_checks_are_listed(found: dict[str, str]) -> None:
    assert sorted(found) == sorted(CHECKS)
