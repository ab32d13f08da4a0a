"""ComfyUI's own VAE of Wan's full shapes, with random weights: WanCore Decode to Video makes the frames of VAE Decode
from the weights that ComfyUI holds. `native_vae.py` runs in ComfyUI's Python."""

from __future__ import annotations

import pytest

from tests.comfyui import find_newer_comfyui, printed_by

pytestmark = [pytest.mark.comfy, pytest.mark.slow]


@pytest.mark.parametrize("case", ["2.1 float32", "2.2 float32", "2.1 bfloat16", "2.1 float16"])
def test_the_frames_are_those_of_vae_decode(case: str) -> None:
    """fp32: levels differ only where a rounding error crosses from one to the next. Half precision: two orders of the
    same operations differ by some levels of 255 where both round; WanCore's is as close to fp32 as ComfyUI's."""
    compared = printed_by("native_vae.py", find_newer_comfyui(), case)[case]
    assert compared["frames"] and compared["weights stay"] and compared["spread"] > 0.02
    if case.endswith("float32"):
        assert compared["error"] <= 1e-5 and compared["levels apart"] == 0 and compared["levels"] <= 1
    ours, native = compared["rounding"]
    assert ours <= 1.05 * native
