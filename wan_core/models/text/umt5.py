"""UMT5, the text encoder of Wan: a T5 encoder whose layers each have their own relative position table.

Parameter names are those of the official `models_t5_umt5-xxl-enc-bf16.pth`. bfloat16 and float32 only:
float16 overflows.

Legend: B batch, L tokens, H heads, D head dim, C width. Source: Wan2.2/wan/modules/t5.py; Raffel et al.,
https://arxiv.org/abs/1910.10683; Chung et al., https://arxiv.org/abs/2304.09151.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.block_weights import RESIDENT, BlockWeights
from wan_core.models.text.tokenizer import TokenCount, Tokenizer, prompt_notes


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """UMT5 encoder. Each layer has its own relative position table. Source: Wan2.2/wan/modules/t5.py."""

    vocab_size: int = 256384
    dim: int = 4096
    dim_attn: int = 4096
    dim_ffn: int = 10240
    num_heads: int = 64
    num_layers: int = 24
    num_buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6


UMT5_XXL = TextConfig()


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last dimension, statistics in float32 (inside the kernel)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class RelativePosition(nn.Module):
    """A learned score per head for each bucket of distances between two tokens."""

    def __init__(self, num_buckets: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_buckets, num_heads)

    def forward(self, buckets: Tensor) -> Tensor:
        """buckets int64 [2L - 1], one per distance -> scores [1, H, L, L], query rows and key columns."""
        scores = self.embedding(buckets).T  # [H, 2L - 1]: a score depends on key - query only
        length = (scores.shape[-1] + 1) // 2
        # The window that starts at r holds the distances -(L-1)+r .. r: the row of query L-1-r. Hence the flip.
        return scores.unfold(-1, length, 1).flip(-2)[None]


class Attention(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.k = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.v = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.o = nn.Linear(config.dim_attn, config.dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [B, L, C], bias [B, H, L, L] -> [B, L, C]."""
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, L, D]
            for linear in (self.q, self.k, self.v)
        )
        # T5 folds 1 / sqrt(D) into the weights. The softmax is float32 inside every kernel.
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(config.dim, config.dim_ffn, bias=False), nn.GELU(approximate="tanh"))
        self.fc1 = nn.Linear(config.dim, config.dim_ffn, bias=False)
        self.fc2 = nn.Linear(config.dim_ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x) * self.gate(x))


class Block(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.dim, config.eps)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.dim, config.eps)
        self.ffn = FeedForward(config)
        self.pos_embedding = RelativePosition(config.num_buckets, config.num_heads)

    def forward(self, x: Tensor, buckets: Tensor, padding: Tensor) -> Tensor:
        """x float32 [B, L, C], buckets int64 [2L - 1], padding bool [B, 1, 1, L] -> float32 [B, L, C]."""
        bias = self.pos_embedding(buckets)
        # The lowest finite score instead of -inf: its softmax weight is exactly zero as well, and no NaN can occur.
        bias = bias.masked_fill(padding, torch.finfo(bias.dtype).min)  # [B, H, L, L]
        x = x + self.attn(self.norm1(x).to(bias.dtype), bias)
        return x + self.ffn(self.norm2(x).to(bias.dtype))


class UMT5Encoder(nn.Module):
    """Token ids -> features. Built from a `TextConfig`. `weights`: where those of its blocks are."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.thresholds = bucket_thresholds(config.num_buckets, config.max_distance)
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.eps)
        self.weights: BlockWeights = RESIDENT

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids int64 [B, L] below `config.vocab_size`, mask bool [B, L], False for padding (never attended to) ->
        [B, L, dim] in the dtype of the weights; rows of padding have no meaning. Never synchronises with the device."""
        buckets = distance_buckets(ids.shape[1], self.config.num_buckets, self.thresholds, ids.device)
        padding = ~mask[:, None, None]
        rows = self.token_embedding(ids)
        x = rows.float()  # sums of 48 results in bfloat16 would lose most of the precision
        for layer, block in enumerate(self.blocks):
            self.weights.enter(layer)
            x = block(x, buckets, padding)
            self.weights.leave(layer)
        return self.norm(x).to(rows.dtype)


def bucket_thresholds(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket beyond `num_buckets // 4`: (12, 16, 23, 32, 46, 64, 91) for UMT5.

    Half of the buckets are for keys before or at the query, half for keys after it. The first half of each are for
    single distances, the others widen logarithmically up to `max_distance`: the i-th begins at
    exact * (max_distance / exact)^(i / wide). Computed in integers, so that rounding of logarithms has no influence.
    """
    exact = num_buckets // 4
    wide = num_buckets // 2 - exact
    thresholds: list[int] = []
    distance = exact
    for i in range(1, wide):
        while distance**wide * exact**i < max_distance**i * exact**wide:
            distance += 1
        thresholds.append(distance)
    return tuple(thresholds)


def distance_buckets(length: int, num_buckets: int, thresholds: tuple[int, ...], device: torch.device) -> Tensor:
    """The bucket of every distance key - query among `length` tokens, -(L-1) .. L-1: int64 [2L - 1]."""
    distance = torch.arange(1 - length, length, device=device)
    ahead = (distance > 0) * (num_buckets // 2)
    bucket = distance.abs().clamp(max=num_buckets // 4)
    for threshold in thresholds:
        bucket = bucket + (distance.abs() >= threshold)
    return ahead + bucket


TOGETHER = 16  # prompts in a batch: scores of attention over 512 tokens take 1 GiB for so many


class TextEncoder(nn.Module):
    """A text encoder with its tokenizer: prompts -> feature rows.

    Raises ValueError if the tokenizer has more pieces than the encoder's embedding has rows.
    """

    def __init__(self, encoder: UMT5Encoder, tokenizer: Tokenizer) -> None:
        super().__init__()
        rows = encoder.config.vocab_size
        if len(tokenizer) > rows:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} pieces, but the text encoder's embedding has {rows} rows. "
                "Use the spiece.model that came with the text encoder (google/umt5-xxl for Wan)."
            )
        self.encoder = encoder
        self.tokenizer = tokenizer

    def tokenize(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids int64 [B, L] and mask bool [B, L] of `prompts` for `encoder`, on its device; L is the longest prompt."""
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"{prompts!r} given; a list of at least one prompt is needed")
        rows = [self.tokenizer.encode(prompt) for prompt in prompts]
        length = max(map(len, rows))
        ids = torch.tensor([row + [self.tokenizer.pad_id] * (length - len(row)) for row in rows])
        mask = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows])
        device = self.encoder.token_embedding.weight.device
        return ids.to(device), mask.to(device)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Rows [B, L, dim] of `prompts`, at most `TOGETHER` in a batch, in the encoder's dtype; without gradients.

        L is the longest prompt's length. Rows beyond a prompt's own length are zero, as in training; the transformer
        pads to 512 rows itself. An empty prompt is one row, that of the end token.
        """
        ids, mask = self.tokenize(prompts)
        batches = zip(ids.split(TOGETHER), mask.split(TOGETHER), strict=True)
        return torch.cat(
            [self.encoder(own, own_mask).masked_fill(~own_mask[..., None], 0) for own, own_mask in batches]
        )

    def read(self, prompts: Sequence[str]) -> tuple[Tensor, list[TokenCount]]:
        """The rows of `encode`, and how many tokens of each prompt were read."""
        return self.encode(prompts), [self.tokenizer.count(prompt) for prompt in prompts]


class PromptCache:
    """The rows of the newest prompts of one encoder, about `limit`, on the CPU: at most 4 MB each for UMT5-XXL in bf16.

    They are kept by batch. A prompt's rows are rounded in another way alone or beside other prompts: taken from another
    batch, a video would depend on the prompts that this process has encoded before."""

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._batches: OrderedDict[tuple[str, ...], dict[str, tuple[Tensor, TokenCount]]] = OrderedDict()

    def encode(
        self,
        prompts: Sequence[str],
        read: Callable[[Sequence[str]], tuple[Iterable[Tensor], Sequence[TokenCount]]],
    ) -> list[Tensor]:
        """Rows [1, L, dim] of each prompt, L its own length.

        `read`, such as `TextEncoder.read`, is called with each prompt once, unless these were encoded together before.
        """
        batch = tuple(dict.fromkeys(prompts))
        if batch not in self._batches:
            self._batches[batch] = {
                prompt: (rows[None, : count.read].to("cpu", copy=True), count)
                for prompt, rows, count in zip(batch, *read(batch), strict=True)
            }
        self._batches.move_to_end(batch)
        while len(self._batches) > 1 and sum(map(len, self._batches)) > self.limit:
            self._batches.popitem(last=False)
        return [self._newest[prompt][0] for prompt in prompts]

    @property
    def _newest(self) -> dict[str, tuple[Tensor, TokenCount]]:
        return next(reversed(self._batches.values()))

    def count(self, prompt: str) -> TokenCount:
        """The tokens of a prompt of the last `encode`."""
        return self._newest[prompt][1]

    def notes(self, prompt: str, name: str = "prompt") -> list[str]:
        """What the user should know of how a prompt of the last `encode` was read, which is called `name`."""
        return prompt_notes(name, prompt, self.count(prompt))
