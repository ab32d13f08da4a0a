"""The memory for which a step cache on ComfyUI's own Wan models asks ComfyUI, beside the bytes that it keeps.

`native_reserve.py` measures both in ComfyUI's Python, once for all of these tests; `native_reserve.json` has what it
measured: `python tests/nodes/native_reserve.py COMFYUI_PATH | tail -1 > tests/nodes/native_reserve.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.comfyui import find_newer_comfyui, printed_by

pytestmark = pytest.mark.comfy
TABLE: dict[str, list[int]] = json.loads(Path(__file__).with_name("native_reserve.json").read_text())
OFF = {"windows, uniform", "windows, looped"}  # windows that move: nothing is kept


@pytest.fixture(scope="module")
def measured() -> dict[str, list[int]]:
    return printed_by("native_reserve.py", find_newer_comfyui())


@pytest.mark.parametrize("name", TABLE)
def test_what_is_kept_was_asked_for(measured: dict[str, list[int]], name: str) -> None:
    asked, kept_bytes = measured[name]
    assert 0.95 * kept_bytes <= asked <= 1.1 * kept_bytes and (kept_bytes == 0) == (name in OFF)


def test_the_table_is_what_was_measured(measured: dict[str, list[int]]) -> None:
    assert measured == TABLE
