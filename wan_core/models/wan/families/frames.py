"""What S2V and Animate share: features over time that become tokens of latent frames, and attention of the video's
tokens to those of their own frame.

Legend: B batch, L tokens, C channels, A frames of features, T latent frames, N tokens of a frame, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


class CausalConv(nn.Module):
    """A convolution over time [B, C, A], with the first frame repeated in front; in the dtype of the features."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, 3, stride)

    def forward(self, x: Tensor) -> Tensor:
        assert self.conv.bias is not None
        weight, bias = self.conv.weight.to(x.dtype), self.conv.bias.to(x.dtype)
        return F.conv1d(F.pad(x, (2, 0), mode="replicate"), weight, bias, self.conv.stride)


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def activated(x: Tensor) -> Tensor:
    """[B, C, A], normalised over its channels, through SiLU."""
    return F.silu(normed(x.transpose(1, 2))).transpose(1, 2)


def attend_to_frames(q: Tensor, keys: Tensor, values: Tensor, frame: Tensor) -> Tensor:
    """q [B, L, H, D] of the latent frames `frame` [L], keys and values [b, T, N, H, D] -> [B, L, C].

    A frame's tokens need not stand together (ranks and sparse attention order them), so the tokens of all frames are
    keys, of which each query sees those of its frame: there are about a hundred.
    """
    T, N = keys.shape[1:3]
    own = frame[:, None] == torch.arange(T, device=frame.device).repeat_interleave(N)  # [L, T * N]
    heads = (x.transpose(1, 2) for x in (q, *(x.flatten(1, 2).expand(len(q), -1, -1, -1) for x in (keys, values))))
    return F.scaled_dot_product_attention(*heads, attn_mask=own).transpose(1, 2).flatten(-2)
