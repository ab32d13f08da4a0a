"""Prompts that change during a run: WanCore from MODEL and WanCore Sampler against ComfyUI's own sampler, on tiny
models of its classes. `native_texts.py` runs in ComfyUI's Python, once for all of these tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.comfyui import QUIET, find_comfyui, python_of
from tests.nodes.native_texts import CASES

pytestmark = pytest.mark.comfy
SCRIPT = Path(__file__).with_name("native_texts.py")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    checkout = find_comfyui()
    done = subprocess.run([python_of(checkout), str(SCRIPT), str(checkout)], capture_output=True, text=True,
                          env={**os.environ, **QUIET}, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_every_step_has_the_text_that_comfyuis_sampler_gives_it(found: dict[str, Any], name: str) -> None:
    run = found[name]
    assert run["error"] <= 2e-5 < 1e-2 < run["changes"] and len(set(run["texts"])) > 1, run
