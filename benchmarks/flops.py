"""The arithmetic of one forward, counted from the architecture: what time is divided into.

Counted are matrix products, two operations for each multiplication with its addition: linears, self-attention and
cross-attention. Norms, rotations and activations are memory traffic, and leaving them out is the custom. What a prompt
needs once (text embedding, cross-attention keys and values) belongs to no forward; a peer that computes it in every
step gets no credit for that.

Legend: L tokens, S text rows, C channels, N channels of the feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from wan_core.models.wan.config import DiTConfig


@dataclass(frozen=True)
class Flops:
    """Operations of one forward of one sample."""

    linears: int  # of the blocks: what FP8 speeds up
    self_attention: int
    cross_attention: int
    ends: int  # patch and time embedding, head

    @property
    def total(self) -> int:
        return self.linears + self.self_attention + self.cross_attention + self.ends


def forward_flops(config: DiTConfig, tokens: int) -> Flops:
    """The products for one sample of `tokens` tokens that share one timestep, its text prepared."""
    C, N, L, S, blocks = config.dim, config.ffn_dim, tokens, config.text_len, config.num_layers
    products = 4 * C * C + 2 * C * C + 2 * C * N  # q, k, v, o; q, o; up, down
    patch = prod(config.patch_size)
    ends = L * C * patch * (config.in_channels + config.out_channels) + (config.freq_dim + 7 * C) * C
    return Flops(
        linears=2 * blocks * L * products,
        self_attention=2 * blocks * 2 * L * L * C,
        cross_attention=2 * blocks * 2 * L * S * C,
        ends=2 * ends,
    )
