"""Prompts that change during a run: WanCore from MODEL and WanCore Sampler against ComfyUI's own sampler, on tiny
models of its classes. `native_texts.py` runs in ComfyUI's Python, once for all of these tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.comfyui import find_comfyui, printed_by
from tests.nodes.native_texts import CASES

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    return printed_by("native_texts.py", find_comfyui())


@pytest.mark.parametrize("name", CASES)
def test_every_step_has_the_text_that_comfyuis_sampler_gives_it(compared: dict[str, Any], name: str) -> None:
    run = compared[name]
    texts = run["texts"]
    assert run["error"] <= 2e-5 < 1e-2 < run["changes"] and len({one for step in texts for one in step}) > 1, run
    assert any(len(step) > 1 for step in texts) == any(word in name for word in ("meet", "overlap", "combined")), texts
