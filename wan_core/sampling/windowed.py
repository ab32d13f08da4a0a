"""Context windows carried out: a forward for each window of a step, and the noise that they begin with.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from wan_core.config import WindowOptions
from wan_core.sampling.context_windows import fuse_weights
from wan_core.sampling.plan import Step

Forward = Callable[[Tensor, Tensor, int], Tensor]
"""(inputs [B, C_in, t, Y, X], time [B] or [B, t], number of the window) -> velocity [B, C, t, Y, X]."""


def in_windows(
    forward: Forward, inputs: Tensor, time: Tensor, step: Step, options: WindowOptions, channels: int
) -> Tensor:
    """The velocity float32 [B, C, T, Y, X] of all frames, fused from a forward of each window of `step`.

    inputs: [B, C_in, T, Y, X], `channels` of noise before those of an image. time: [B], or [B, T].
    """
    T, fused = inputs.shape[2], None
    weights = fuse_weights(step.windows, options, T)
    for number, (window, shares) in enumerate(zip(step.windows, weights, strict=True)):
        seen = options.seen(window)
        own, own_time = taken(inputs, seen, 2), time if time.ndim == 1 else taken(time, seen, 1)
        if options.retain_first:
            own = own.clone()
            own[:, channels:, 0] = inputs[:, channels:, 0]
        velocity = forward(own, own_time, number)[:, :, len(seen) - len(window) :]
        if fused is None:
            fused = velocity.new_zeros(*velocity.shape[:2], T, *velocity.shape[3:])
        for position, (frame, share) in enumerate(zip(window, shares, strict=True)):
            fused[:, :, frame].add_(velocity[:, :, position], alpha=share)  # no number goes to the device
    assert fused is not None
    return fused


def taken(x: Tensor, frames: Sequence[int], dim: int) -> Tensor:
    """`frames` of `x` along `dim`; a view where they follow one another."""
    breaks = [n for n, (one, other) in enumerate(pairwise(frames), 1) if other != one + 1]
    ends = pairwise([0, *breaks, len(frames)])
    pieces = [x.narrow(dim, frames[first], last - first) for first, last in ends]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def reordered_noise(noise: Tensor, options: WindowOptions, seed: int) -> Tensor:
    """`noise` [B, C, T, Y, X] on the CPU, in which frames after the first window are earlier ones in another order, so
    that windows begin with noise that is alike. Source: FreeNoise, arXiv:2310.15169, drawn as ComfyUI does."""
    generator, frames, noise = torch.Generator().manual_seed(seed), noise.shape[2], noise.clone()
    new = options.length - options.overlap
    for first in range(0, frames - options.length, new):
        start = first + options.length
        count = min(new, frames - start)
        noise[:, :, start : start + count] = noise[:, :, torch.randperm(count, generator=generator) + first]
    return noise
