"""A prompt that was cut, and weights that are read as text, are said: in the report, in the log, on the node."""

from __future__ import annotations

import pytest
import torch

from wan_core.checkpoint import load_text_encoder
from wan_core.models.text.tokenizer import TokenCount, prompt_notes
from wan_core.models.text.umt5 import PromptCache, TextEncoder
from wan_core.pipeline.sources import TINY

SENTENCE = "a red circle moving right on a blue background"


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return load_text_encoder(TINY / "text_encoder.safetensors", dtype=torch.float32)


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        ("a (red:1.4) circle", "(red:1.4)"),
        ("((very) red: .5 ) circle", None),
        ("a (deep red: 2) circle", "(deep red: 2)"),
        ("(blurry:-1)", "(blurry:-1)"),
        ("at (12:30 pm) in (Paris)", None),
        ("a (red) circle", None),
        ("smile :) and 1:2", None),
    ],
)
def test_weights_are_text(text: str, weight: str | None) -> None:
    notes = prompt_notes("prompt", text, TokenCount(9, 9))
    assert [f"{weight}: it is read as text" in note for note in notes] == ([True] if weight else [])


def test_the_tokens_that_are_not_read(encoder: TextEncoder) -> None:
    tokenizer = encoder.tokenizer
    most = tokenizer.max_length
    for text in ("", SENTENCE, SENTENCE * 100):
        count = tokenizer.count(text)
        assert count.read == len(tokenizer.encode(text)) == min(count.given, most)
    pieces = [n for n in range(1, 4 * most) if tokenizer.count("red " * n).given == most]
    assert pieces and prompt_notes("prompt", "red " * pieces[-1], tokenizer.count("red " * pieces[-1])) == []
    (note,) = prompt_notes("prompt", "red " * 4 * most, tokenizer.count("red " * 4 * most))
    assert f"and {most} are read: its end was cut" in note


def test_rows_of_a_prompt_do_not_depend_on_what_was_encoded_before(encoder: TextEncoder) -> None:
    cache, prompts = PromptCache(), [SENTENCE, "blurred"]
    cache.encode(["a green star on a blue background", "blurred"], encoder.read)
    for rows, of_a_new_cache in zip(
        cache.encode(prompts, encoder.read), PromptCache().encode(prompts, encoder.read), strict=True
    ):
        assert torch.equal(rows, of_a_new_cache)


@pytest.mark.parametrize("count", [1, 3, 4, 40])
def test_a_cache_keeps_all_of_the_last_call(encoder: TextEncoder, count: int) -> None:
    """Prompts over Time encodes more texts at once than stay for later, the first of them empty."""
    cache, prompts = PromptCache(limit=3), ["", *(f"a red circle {n}" for n in range(1, count))]
    for texts in (["blue"], prompts, prompts[::-1], prompts * 2):
        rows = cache.encode(texts, encoder.read)
        assert [row.shape[1] for row in rows] == [cache.count(text).read for text in texts]
        assert sum(map(len, cache._batches)) <= max(3, len(set(texts)))
    alone = torch.cat([encoder.encode([text])[0] for text in prompts])
    torch.testing.assert_close(
        torch.cat([row[0] for row in cache.encode(prompts, encoder.read)]), alone, atol=1e-5, rtol=1e-4
    )
