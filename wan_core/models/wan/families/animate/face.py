"""The face branch of Animate: motion of a face -> five tokens for each latent frame -> attention to them after every
fifth block.

Legend: B batch, L video tokens, T latent frames, N face tokens of a frame (5), H heads, D head dim, C = H * D, F face
frames.
Source: Wan2.2/wan/modules/animate/face_blocks.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.animate.config import AnimateConfig
from wan_core.models.wan.layers import RMSNorm
from wan_core.ops.quant.linear import Linear

EPS = 1e-6


class CausalConv(nn.Module):
    """A convolution over time [B, C, F], with the first frame repeated in front."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, 3, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (2, 0), mode="replicate"))


class FaceEncoder(nn.Module):
    """Motion [B, F, features] -> tokens [B, T - 1, N, C], F = 4 (T - 1) - 3."""

    def __init__(self, config: AnimateConfig) -> None:
        super().__init__()
        hidden, self.tokens = config.face_hidden, config.face_tokens
        self.conv1_local = CausalConv(config.motion_features, hidden * self.tokens)
        self.conv2 = CausalConv(hidden, hidden, stride=2)
        self.conv3 = CausalConv(hidden, hidden, stride=2)
        self.out_proj = Linear(hidden, config.dim)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, config.dim))

    def forward(self, motion: Tensor) -> Tensor:
        x = self.conv1_local(motion.transpose(1, 2))
        x = _activated(x.unflatten(1, (self.tokens, -1)).flatten(0, 1))  # [B * 4, hidden, F]
        x = _activated(self.conv3(_activated(self.conv2(x))))
        x = self.out_proj(x.transpose(1, 2)).unflatten(0, (-1, self.tokens)).transpose(1, 2)  # [B, T - 1, 4, C]
        return torch.cat([x, self.padding_tokens.expand(*x.shape[:2], -1, -1)], dim=2)


def _activated(x: Tensor) -> Tensor:
    """[B, C, F], normalised over its channels, through SiLU."""
    return F.silu(_normed(x.transpose(1, 2))).transpose(1, 2)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


class FaceFuser(nn.Module):
    """Attention of video tokens to the face tokens of their latent frame."""

    def __init__(self, config: AnimateConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.linear1_kv = Linear(config.dim, 2 * config.dim)
        self.linear1_q = Linear(config.dim, config.dim)
        self.linear2 = Linear(config.dim, config.dim)
        self.q_norm = RMSNorm(config.head_dim, EPS)
        self.k_norm = RMSNorm(config.head_dim, EPS)

    def kv(self, face: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, N, H, D] of face tokens [B, T, N, C]. They do not depend on the step."""
        k, v = self.linear1_kv(_normed(face)).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        return _head_norm(k, self.k_norm), v

    def forward(self, tokens: Tensor, kv: tuple[Tensor, Tensor], frame: Tensor) -> Tensor:
        """tokens [B, L, C] of the latent frames `frame` [L], kv of `kv` -> what is to be added to them, [B, L, C].

        A frame's tokens need not stand together (ranks and sparse attention order them), so all face tokens are keys,
        of which each query sees those of its frame: there are no more than a hundred.
        """
        k, v = kv
        T, N = k.shape[1:3]
        B = tokens.shape[0]
        q = _head_norm(self.linear1_q(_normed(tokens)).unflatten(-1, (self.heads, -1)), self.q_norm)
        own = frame[:, None] == torch.arange(T, device=frame.device).repeat_interleave(N)  # [L, T * N]
        heads = (x.transpose(1, 2) for x in (q, *(x.flatten(1, 2).expand(B, -1, -1, -1) for x in (k, v))))
        out = F.scaled_dot_product_attention(*heads, attn_mask=own)
        return self.linear2(out.transpose(1, 2).flatten(-2))


def _head_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """[..., H, D], each head divided by its root mean square, in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return wide.to(x.dtype) * norm.weight.to(x.dtype)
