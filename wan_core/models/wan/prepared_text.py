"""A prompt, and what a family takes beside it, as the blocks of one expert use them: made once, used in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
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
    videos that a forward ran over to prepare it. bias: [B, T, S], what is added to the scores that the tokens of each
    latent frame give each text row (prompts over time); None: nothing."""

    keys_values: tuple[tuple[Tensor, ...], ...]
    own: OwnInputs | None = None
    passes: int = 0
    bias: Tensor | None = None

    def rows(self, start: int, stop: int) -> PreparedText:
        """Views of the prompts start..stop of the batch."""
        own = None if self.own is None else self.own.rows(start, stop)
        bias = None if self.bias is None else self.bias[start:stop]
        return PreparedText(tuple(tuple(t[start:stop] for t in kv) for kv in self.keys_values), own, bias=bias)

    def with_negative(self, negative: PreparedText, numbers: Tensor) -> PreparedText:
        """The same with normalized attention guidance away from the text of `negative`."""
        both = zip(self.keys_values, negative.keys_values, strict=True)
        return self._replace(keys_values=tuple((*kv, *away[:2], numbers) for kv, away in both))

    def of_frames(self, frames: Sequence[int]) -> PreparedText:
        """The same for a forward that sees these latent frames."""
        return self if self.bias is None else self._replace(bias=self.bias[:, list(frames)])

    def token_bias(self, grid: tuple[int, int, int], order: Tensor | None, tokens: int) -> TokenBias | None:
        """`bias` for the tokens that the blocks get. grid: token frames, rows, columns; frames more than `bias` has
        stand in front of the video, as pictures do, and are as its first one. order: which token of the video each
        is."""
        if self.bias is None:
            return None
        frames, (T, rows, columns) = self.bias.shape[1], grid
        order = torch.arange(tokens, device=self.bias.device) if order is None else order
        return TokenBias((order // (rows * columns) - (T - frames)).clamp_(0, frames - 1), self.bias)


class TokenBias(NamedTuple):
    """What cross-attention adds to its scores: the row of `rows` [B, T, S] that `frames`, int64 [L], names for a
    token."""

    frames: Tensor
    rows: Tensor
