"""Neighbours of a video folded into channels, and back: the shortcuts and the patches of Wan 2.2's VAE.

Shapes as in `layers`. Source: Wan2.2/wan/modules/vae2_2.py.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def fold_average(x: Tensor, out_channels: int, time: int, space: int) -> Tensor:
    """Downsampling shortcut: folds `time` x `space` x `space` neighbours into channels, then averages groups of
    channels.

    [B, C, T, Y, X] -> [B, out_channels, ceil(T / time), Y / space, X / space]. Missing frames before frame 0 are zeros.
    """
    x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % time, 0)) if x.shape[2] % time else x
    x = x.unflatten(4, (-1, space)).unflatten(3, (-1, space)).unflatten(2, (-1, time))
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6)  # [B, C, time, space, space, T, Y, X]
    return x.flatten(1, 4).unflatten(1, (out_channels, -1)).mean(dim=2)


def unfold_repeat(x: Tensor, out_channels: int, time: int, space: int, first: bool) -> Tensor:
    """Upsampling shortcut: repeats channels, then unfolds them into `time` x `space` x `space` neighbours.

    [B, C, T, Y, X] -> [B, out_channels, T * time, Y * space, X * space], without the frames before frame 0.
    """
    repeats = out_channels * time * space * space // x.shape[1]
    x = x.repeat_interleave(repeats, dim=1).unflatten(1, (out_channels, time, space, space))
    x = x.permute(0, 1, 5, 2, 6, 3, 7, 4)  # [B, C, T, time, Y, space, X, space]
    x = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
    return x[:, :, time - 1 :] if first else x


def fold_patches(video: Tensor, patch: int) -> Tensor:
    """[B, C, F, H, W] -> [B, C * column * row, F, H / patch, W / patch], `row` and `column` inside the patch."""
    if patch == 1:
        return video
    x = video.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))  # [B, C, F, H, row, W, column]
    return x.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def unfold_patches(x: Tensor, patch: int) -> Tensor:
    """The inverse of `fold_patches`."""
    if patch == 1:
        return x
    x = x.unflatten(1, (-1, patch, patch))  # [B, C, column, row, F, H, W]
    return x.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)
