"""Host memory that a node takes while it makes the inputs of a video, and frames while they are decoded: sizes that are
refused before anything of that size is made.

`peak_bytes` is the one function for all families. Its numbers per pixel are measured (`tests/nodes/host_peaks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from wan_core.config import OptionError
from wan_core.execution.report import GIB
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.families.family import Family
from wan_core.sampling.conditioning import latent_shape


def peak_bytes(
    family: Family,
    config: VAEConfig,
    width: int,
    height: int,
    frames: int,
    *,
    batch: int = 1,
    given: Collection[str] = (),
) -> int:
    """Bytes of everything that exists at once: latents of `batch` videos with the copy that is repeated, and what the
    family makes of the fields `given`. config: of the VAE. Raises OptionError for a size that cannot be made."""
    latents = 4 * math.prod(latent_shape(config, width, height, frames)) * (1 + batch)
    return latents + family.picture_bytes(width, height, frames, given)


def check_peak(
    family: Family,
    config: VAEConfig,
    size: tuple[int, int, int],
    room: int,
    *,
    batch: int = 1,
    given: Collection[str] = (),
) -> None:
    """Raise OptionError where `peak_bytes` of size (width, height, frames) is more than the `room` that is available,
    with how many frames would fit."""
    width, height, frames = size

    def peak(frames: int, batch: int = batch) -> int:
        return peak_bytes(family, config, width, height, frames, batch=batch, given=given)

    if peak(frames) <= room:
        return
    fitting = largest(lambda count: peak(4 * count + 1) <= room, (frames - 1) // 4)
    several = f" of {batch} videos" if batch > 1 else ""
    advice = f"at this size at most {4 * fitting + 1} frames fit" if fitting else "choose a smaller size"
    if not fitting and peak(frames, 1) <= room:
        advice = "make fewer videos at once"
    raise OptionError(
        f"the inputs{several} of {width}x{height} and {frames} frames take {peak(frames) / GIB:.3g} GiB of host memory "
        f"at once, and {room / GIB:.3g} GiB are available: {advice}"
    )


def check_pictures(shape: tuple[int, ...], room: int) -> None:
    """Raise OptionError where decoded frames [F, H, W, 3] in float32 are more than the `room` that is available."""
    needed = 4 * math.prod(shape)
    if needed > room:
        frames, height, width = shape[:3]
        raise OptionError(
            f"{frames} frames of {width}x{height} take {needed / GIB:.3g} GiB of host memory as IMAGE, and "
            f"{room / GIB:.3g} GiB are available: use WanCore Decode to Video, which writes them while they are made, "
            "or make a smaller or shorter video"
        )


def check_sampling(shape: tuple[int, ...], needed: int, room: int) -> None:
    """Raise OptionError where sampling latents [B, C, T, Y, X] on a CPU takes more than the `room` that is available.
    needed: bytes of everything but weights."""
    if needed > room:
        raise OptionError(
            f"sampling latents of {' x '.join(map(str, shape))} on a CPU takes {needed / GIB:.3g} GiB of host memory "
            f"in addition to the weights, and {room / GIB:.3g} GiB are available: make a smaller or shorter video"
        )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 to `most` that fits, where all smaller ones fit too; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
