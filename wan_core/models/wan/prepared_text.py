"""A prompt as the blocks of one expert attend to it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PreparedText(NamedTuple):
    """What a prompt is to one expert: cross-attention keys and values of every block, each [B, S, H, D], as
    `CrossAttention.kv` makes them."""

    keys_values: tuple[tuple[Tensor, ...], ...]

    def rows(self, start: int, stop: int) -> PreparedText:
        """Views of the prompts start..stop of the batch."""
        return PreparedText(tuple(tuple(t[start:stop] for t in kv) for kv in self.keys_values))
