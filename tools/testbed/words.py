"""The test bed's tokenizer, and captions as token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tools.testbed.scenes import sample_worlds
from tools.tiny.words import train_tokenizer as train_pieces
from wan_core.models.text.tokenizer import Tokenizer

TEXT_LEN = 48  # rows of text that the transformers see, padding included; captions have at most 37
SILENT = 64


def train_tokenizer() -> bytes:
    """Every word of the captions is a piece. The same bytes on every run."""
    return train_pieces([world.caption for world in sample_worlds(1000, seed=0)], whole=())


def token_rows(tokenizer: Tokenizer, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Ids int64 and mask bool, [len(prompts), TEXT_LEN]."""
    ids = torch.full((len(prompts), TEXT_LEN), tokenizer.pad_id)
    mask = torch.zeros(len(prompts), TEXT_LEN, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        row = tokenizer.encode(prompt)
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids, mask


def silent_prompts() -> list[str]:
    """SILENT prompts that say nothing, for caption dropout: three quarters are empty, the others letters in any order,
    so that any negative prompt means about the same."""
    rng = random.Random(0)

    def gibberish() -> str:
        return " ".join(
            "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 5))) for _ in range(rng.randint(1, 5))
        )

    return [gibberish() if i % 4 == 0 else "" for i in range(SILENT)]
