"""Sizes that are refused because host memory is too small for what nodes make of them."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.config import OptionError
from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.fun.camera import camera_rays, read_camera
from wan_core.models.wan.families.vace.inputs import comfy_extras
from wan_core.pipeline.memory_planning import check_peak, peak_bytes

GIB = 2**30
FIELDS = ("image", "control_video", "camera", "background", "face_video", "pose_video", "carried")


@pytest.mark.parametrize(
    ("family", "size", "batch", "given", "gib"),
    [
        ("wan", (8192, 8192, 1001), 1, (), 31.4),  # latents, and the copy that is repeated
        ("wan", (2048, 2048, 81), 64, (), 5.3),
        ("wan", (1280, 720, 81), 1, ("image",), 3.8),
        ("wan", (4096, 4096, 401), 1, ("image",), 341.5),
        ("camera", (8192, 8192, 81), 1, ("camera",), 139.0),
        ("vace", (2048, 2048, 401), 1, (), 126.1),
        ("vace", (832, 480, 81), 1, ("control_video",), 2.8),
        ("animate2", (8192, 8192, 81), 1, (), 316.5),
        ("s2v", (8192, 8192, 77), 1, (), 2.5),
    ],
)
def test_what_sizes_take(family: str, size: tuple[int, int, int], batch: int, given: tuple[str, ...], gib: float):
    """The largest sizes that widgets allow, some that once ended a server, and usual ones."""
    needed = peak_bytes(FAMILIES[family], VAE_21, *size, batch=batch, given=given)
    assert needed / GIB == pytest.approx(gib, rel=0.02)
    with pytest.raises(OptionError, match=rf"{size[0]}x{size[1]} and {size[2]} frames take .* GiB .* are available: "):
        check_peak(FAMILIES[family], VAE_21, size, needed - 1, batch=batch, given=given)
    check_peak(FAMILIES[family], VAE_21, size, needed, batch=batch, given=given)


SIZES = st.tuples(st.integers(2, 255).map(lambda n: 32 * n), st.integers(2, 255).map(lambda n: 32 * n),
                  st.integers(0, 1000).map(lambda n: 4 * n + 1))  # fmt: skip


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    vae=st.sampled_from([VAE_21, VAE_22]),
    size=SIZES,
    batch=st.integers(1, 64),
    fields=st.sets(st.sampled_from(FIELDS)),
    room=st.floats(0, 50).map(lambda gib: int(gib * GIB)),
)
def test_the_advice_fits_and_nothing_more_does(family, vae, size, batch, fields, room):
    width, height, frames = size

    def fits(frames: int, batch: int = batch) -> bool:
        return peak_bytes(FAMILIES[family], vae, width, height, frames, batch=batch, given=fields) <= room

    if fits(frames):
        check_peak(FAMILIES[family], vae, size, room, batch=batch, given=fields)
        return
    with pytest.raises(OptionError) as refused:
        check_peak(FAMILIES[family], vae, size, room, batch=batch, given=fields)
    said = re.search(r"at most (\d+) frames fit", str(refused.value))
    if said is not None:
        assert fits(int(said[1])) and not fits(int(said[1]) + 4) and int(said[1]) < frames
    else:
        assert not fits(5) and ("fewer videos" in str(refused.value)) == fits(frames, 1)


# ------------------------------------------------------------------------------------------------------------- measured

WIDTH, HEIGHT, FRAMES = 384, 384, 21
KEPT = 2**26  # of what is freed, the allocator may keep so many bytes


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def encoded(video: torch.Tensor) -> torch.Tensor:
    """What a VAE gives that copies its pictures twice, as a socket does, and encodes nothing."""
    pixels = (video[0].permute(1, 2, 3, 0) + 1) / 2
    frames, height, width = (pixels.float() * 2 - 1).shape[:3]
    return torch.zeros(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("family", ["vace", "camera"])
def test_the_most_memory_at_once_is_what_is_said(family):
    """The same sizes refuse what nodes are asked for."""

    def make() -> object:
        if family == "camera":
            return camera_rays(read_camera("zoom-in", FRAMES), WIDTH, HEIGHT)
        media = {"mask": torch.ones(1, 3, FRAMES, HEIGHT, WIDTH)}
        return comfy_extras(encoded, media, Clip(0, 0, FRAMES, 0), VAE_21)

    make()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what was freed is counted before, and used again unseen
    Path("/proc/self/clear_refs").write_text("5")
    before, made = status("VmRSS"), make()
    measured = status("VmHWM") - before
    said = FAMILIES[family].picture_bytes(WIDTH, HEIGHT, FRAMES, ("camera",))
    assert made is not None
    assert 0.5 * said < measured < said + KEPT
