"""A prompt as the blocks of one expert attend to it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PreparedText(NamedTuple):
    """What a prompt is to one expert: cross-attention keys and values of every block, each [B, S, H, D], as
    `CrossAttention.kv` makes them. With normalized attention guidance also those of the negative prompt, and float32
    [3]: its scale, tau and alpha."""

    keys_values: tuple[tuple[Tensor, ...], ...]

    def rows(self, start: int, stop: int) -> PreparedText:
        """Views of the prompts start..stop of the batch."""
        return PreparedText(tuple(tuple(t[start:stop] for t in kv) for kv in self.keys_values))

    def with_negative(self, negative: PreparedText, numbers: Tensor) -> PreparedText:
        """The same with normalized attention guidance away from the text of `negative`."""
        both = zip(self.keys_values, negative.keys_values, strict=True)
        return PreparedText(tuple((*kv, *away[:2], numbers) for kv, away in both))
