"""The memory for which a step cache on ComfyUI's own Wan models asks ComfyUI, beside the bytes that it keeps: both as
`native_reserve.py` measures them in ComfyUI's Python."""

from __future__ import annotations

import pytest

from tests.comfyui import find_newer_comfyui, printed_by

OFF = {"windows, uniform", "windows, looped"}  # windows that move: nothing is kept
TURNS = ("simple skip-layer guidance", "two prompts, one after the other")  # conditions that take turns: all count


@pytest.mark.comfy
def test_what_is_kept_was_asked_for() -> None:
    measured: dict[str, list[int]] = printed_by("native_reserve.py", find_newer_comfyui())
    assert {name for name, (_, kept_bytes) in measured.items() if not kept_bytes} == OFF
    most = {name: 1.5 if name.startswith(TURNS) else 1.1 for name in measured}
    wrong = {
        name: (asked, kept_bytes)
        for name, (asked, kept_bytes) in measured.items()
        if not 0.95 * kept_bytes <= asked <= most[name] * kept_bytes
    }
    assert not wrong
