"""Wrong values in every widget of every node end in a result or in a sentence. `native_values.py` runs in ComfyUI's
Python."""

from __future__ import annotations

import pytest

from tests.comfyui import find_newer_comfyui, printed_by

pytestmark = pytest.mark.comfy


def test_wrong_values_of_widgets_end_in_a_sentence() -> None:
    found = printed_by("native_values.py", find_newer_comfyui())
    assert not found["faults"], "\n".join(found["faults"])
    assert found["tried"] > 2000 and 0.1 < found["passed"] / found["tried"] < 0.5, found
