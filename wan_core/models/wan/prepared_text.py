"""A prompt as the blocks of one expert attend to it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PreparedText(NamedTuple):
    """What a prompt is to one expert: cross-attention keys and values of every block, each [B, S, H, D]."""

    keys_values: tuple[tuple[Tensor, Tensor], ...]

    def rows(self, start: int, stop: int) -> PreparedText:
        """Views of the prompts start..stop of the batch."""
        return PreparedText(tuple((k[start:stop], v[start:stop]) for k, v in self.keys_values))
