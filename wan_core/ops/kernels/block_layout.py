"""Layouts of block-sparse attention: memory in whole blocks, and what replaces unselected blocks.

Legend: B batch, L tokens, S tokens with the tail, H heads, D head dim, n blocks of keys, r blocks of
queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wan_core.ops.kernels.formats import Quantized


def padded(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


class Blocked(NamedTuple):
    """FP8 numbers [B, L, H, D] with one scale [1], in memory by heads and in whole blocks; zeros after the tokens.

    memory: [B, H, S, D], or [B, H, D, S] where `channels_first`. tokens: L, the tokens that are real.
    """

    memory: Tensor
    scale: Tensor
    tokens: int
    channels_first: bool = False

    @property
    def data(self) -> Tensor:
        """The numbers of the real tokens: a view [B, L, H, D]."""
        if self.channels_first:
            return self.memory[..., : self.tokens].permute(0, 3, 1, 2)
        return self.memory[:, :, : self.tokens].transpose(1, 2)


def heads_first(x: Quantized, block: int) -> Blocked:
    """x [B, L, H, D], copied into memory [B, H, S, D]."""
    batch, tokens, heads, dim = x.data.shape
    memory = x.data.new_zeros(batch, heads, padded(tokens, block), dim)
    blocked = Blocked(memory, x.scale, tokens)
    blocked.data.copy_(x.data)
    return blocked


def channels_first(x: Quantized, block: int) -> Blocked:
    """x [B, L, H, D], copied into memory [B, H, D, S]."""
    batch, tokens, heads, dim = x.data.shape
    memory = x.data.new_zeros(batch, heads, dim, padded(tokens, block))
    blocked = Blocked(memory, x.scale, tokens, channels_first=True)
    blocked.data.copy_(x.data)
    return blocked


class Pooled(NamedTuple):
    """Means that replace unselected key blocks.

    keys, values: means of every block, float32 [B, H, n, D]. kept: selected blocks, which are not replaced, bool
    [B, H, r, n] for r blocks of queries. sizes: int32 [n], the number of tokens of every block. slopes: of the
    unselected values with the queries of a row, [B, H, r, D, D]; None: they stay."""

    keys: Tensor
    values: Tensor
    kept: Tensor
    sizes: Tensor
    slopes: Tensor | None = None


def block_sizes(tokens: int, block: int, device: torch.device) -> Tensor:
    """int32 [n]: the number of tokens of every block."""
    count = -(-tokens // block)
    return (tokens - block * torch.arange(count, device=device, dtype=torch.int32)).clamp(max=block)
