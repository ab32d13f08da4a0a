"""What nodes take of host memory is what `peak_bytes` says, by which sizes are refused: `host_peaks` measures it."""

from __future__ import annotations

import sys

import pytest

from tests.comfyui import find_comfyui, printed_by

pytestmark = [pytest.mark.comfy, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
MIB = 2**20


def test_every_node_takes_what_is_said() -> None:
    found = printed_by("host_peaks.py", find_comfyui())
    assert len(found) == 15
    for name, (measured, said) in found.items():
        assert measured <= said + 8 * MIB, f"{name} takes {measured / MIB:.0f} MiB, and {said / MIB:.0f} are said"
        if name != "sound":  # without pictures next to nothing
            assert measured >= 0.65 * said, f"{name} takes {measured / MIB:.0f} MiB, and {said / MIB:.0f} are said"
