"""A prompt, and what a family takes beside it, as the blocks of one expert use them: made once, used in every step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class OwnInputs(Protocol):
    """What a family prepared beside the text (`WanModel.prepare_text`), for its own `embed` and `run_block`."""

    def rows(self, start: int, stop: int) -> OwnInputs:
        """Those of the videos start..stop of the batch."""
        ...


class PreparedText(NamedTuple):
    """What a prompt is to one expert: cross-attention keys and values of every block, each [B, S, H, D], as
    `CrossAttention.kv` makes them. With normalized attention guidance also those of the negative prompt, and float32
    [3]: its scale, tau and alpha. own: what its family takes beside text; None where that is nothing. passes: driving
    videos that a forward ran over to prepare it."""

    keys_values: tuple[tuple[Tensor, ...], ...]
    own: OwnInputs | None = None
    passes: int = 0

    def rows(self, start: int, stop: int) -> PreparedText:
        """Views of the prompts start..stop of the batch."""
        own = None if self.own is None else self.own.rows(start, stop)
        return PreparedText(tuple(tuple(t[start:stop] for t in kv) for kv in self.keys_values), own)

    def with_negative(self, negative: PreparedText, numbers: Tensor) -> PreparedText:
        """The same with normalized attention guidance away from the text of `negative`."""
        both = zip(self.keys_values, negative.keys_values, strict=True)
        return self._replace(keys_values=tuple((*kv, *away[:2], numbers) for kv, away in both))
