"""A prompt, and what a family takes beside it, as the blocks of one expert use them: made once, used in every step."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

Own = TypeVar("Own")


class OwnInputs(Protocol):
    """What a family prepared beside the text (`WanModel.prepare_text`), for its own `embed` and `run_block`."""

    def rows(self, start: int, stop: int) -> OwnInputs:
        """The inputs of the videos start..stop of the batch."""
        ...


def own_rows(x: Tensor, videos: int, start: int, stop: int) -> Tensor:
    """The rows of the videos start..stop of a batch of `videos`; fewer rows serve several branches of the same videos,
    and stay as they are."""
    return x[start:stop] if len(x) == videos else x


def for_all(x: Tensor, videos: int, name: str, copies: bool = False) -> Tensor:
    """x [b, ...] repeated for so many videos: several branches of the same ones. One row serves all; copies: it is
    repeated, too. Raises ValueError."""
    if videos % len(x):
        raise ValueError(f"{name} for {len(x)} videos given, and {videos} videos")
    if len(x) == videos or (len(x) == 1 and not copies):
        return x
    return x.repeat(videos // len(x), *[1] * (x.ndim - 1))


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
        """This text with normalized attention guidance away from that of `negative`."""
        both = zip(self.keys_values, negative.keys_values, strict=True)
        return self._replace(keys_values=tuple((*kv, *away[:2], numbers) for kv, away in both))

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
    """What cross-attention adds to its scores: the row of `rows` [B, T, S] that `frames`, int64 [L], names."""

    frames: Tensor
    rows: Tensor


def own_inputs(text: PreparedText, kind: type[Own]) -> Own:
    """What a family's model prepared beside the text."""
    assert isinstance(text.own, kind), "text was prepared by a model of another family"
    return text.own
