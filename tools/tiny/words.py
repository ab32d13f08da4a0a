"""The embedded model's tokenizer, and the captions as a table of token ids."""

from __future__ import annotations

import io
import os
import random
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from wan_core.models.text.tokenizer import Tokenizer
from wan_lab.shapes import SCENES

TEXT_LEN = 32  # rows of text that the transformers see, padding included
# Of a token table: prompts that say nothing, for caption dropout. Three quarters empty, the rest gibberish.
DROPPED_ROWS = 64


def train_tokenizer(
    captions: Sequence[str] = tuple(scene.caption for scene in SCENES), whole: Sequence[str] = ("background",)
) -> bytes:
    """A SentencePiece model in which every word of the captions is one piece, and letters spell all others. whole:
    words that the algorithm would spell from pieces.

    Capitals are folded, pad is 0, end 1, unknown 2, as in UMT5. The same bytes on every run.
    """
    import sentencepiece

    words = sorted({word for caption in captions for word in caption.replace(",", " ").split()})
    # Every word alone as well, often: pieces are chosen by how much they shorten the text, and rare words must not be
    # split.
    sentences = [*captions, *words * 50]
    model = io.BytesIO()
    folder = os.getcwd()
    with tempfile.TemporaryDirectory() as scratch:
        # The rules' path is stored in the model: keep it the same on every machine.
        os.chdir(scratch)
        try:
            with open("lowercase.tsv", "w") as rules:
                rules.writelines(f"{ord(c):x}\t{ord(c.lower()):x}\n" for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                model_type="unigram",
                vocab_size=64,
                hard_vocab_limit=False,
                character_coverage=1.0,
                required_chars="abcdefghijklmnopqrstuvwxyz.,",
                normalization_rule_tsv="lowercase.tsv",
                user_defined_symbols=[f"\u2581{word}" for word in whole],
                split_by_whitespace=True,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                num_threads=1,
                minloglevel=2,
            )
        finally:
            os.chdir(folder)
    tokenizer = Tokenizer(model.getvalue(), TEXT_LEN)
    split = [word for word in words if len(tokenizer.encode(word)) != 2]
    if split:
        raise RuntimeError(f"the tokenizer splits {', '.join(split)}: every word of the captions must be one piece")
    return tokenizer.proto


def token_table(tokenizer: Tokenizer, captions: Sequence[str], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids int64 and mask bool, [2 * len(captions) + DROPPED_ROWS, TEXT_LEN]: the captions, the captions with a full
    stop, and prompts that say nothing.

    Those are the empty prompt, which is what the negative prompt usually is, and gibberish, so that any other negative
    prompt means about the same.
    """
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    gibberish = [
        " ".join("".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(rng.randint(1, 6)))
        for _ in range(DROPPED_ROWS // 4)
    ]
    empty = [""] * (DROPPED_ROWS - len(gibberish))
    rows = [tokenizer.encode(prompt) for prompt in (*captions, *(f"{c}." for c in captions), *empty, *gibberish)]
    ids = torch.full((len(rows), TEXT_LEN), tokenizer.pad_id)
    mask = torch.zeros(len(rows), TEXT_LEN, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids, mask
