"""The text encoder against transformers' UMT5EncoderModel, its tokenizer against SentencePiece, and its key tables."""

from __future__ import annotations

import copy
import io

import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import UMT5EncoderModel

from tests.reference_models import transformers_encoder
from wan_core.checkpoint.layouts import hf_text_names, text_config
from wan_core.models.text.tokenizer import Tokenizer, clean
from wan_core.models.text.umt5 import (
    UMT5_XXL,
    TextConfig,
    TextEncoder,
    UMT5Encoder,
    bucket_thresholds,
    distance_buckets,
)
from wan_lab.shapes import SCENES

SMALL = TextConfig(vocab_size=128, dim=48, dim_attn=64, dim_ffn=80, num_heads=4, num_layers=3)
PIECES = 44  # of the tokenizer


@pytest.fixture(scope="module")
def pair() -> tuple[UMT5Encoder, UMT5EncoderModel]:
    """The same random weights in transformers' module and in ours."""
    torch.manual_seed(0)
    theirs = transformers_encoder(SMALL)
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("layer_norm" in name), std=0.15)
    weights = theirs.state_dict()
    names = hf_text_names(weights)
    assert names is not None
    ours = UMT5Encoder(SMALL).eval()
    ours.load_state_dict({names[name]: tensor for name, tensor in weights.items()}, strict=True)
    return ours, theirs


@pytest.fixture(scope="module")
def proto() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([scene.caption for scene in SCENES][:200]),
        model_writer=model,
        vocab_size=PIECES,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=3,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def text(pair, proto) -> TextEncoder:
    return TextEncoder(pair[0], Tokenizer(proto))


def padded(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(SMALL.vocab_size, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


# -------------------------------------------------------------------------------------------------------------- encoder


@torch.no_grad()
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), seed=st.integers(0, 999))
@example(lengths=[300, 120], seed=1)  # beyond the last bucket
def test_matches_transformers(pair, lengths, seed):
    ours, theirs = pair
    ids, mask = padded(lengths, seed)
    expected = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(ours(ids, mask)[mask], expected[mask], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 40), (8, 20), (64, 256)])
def test_buckets_match_transformers(num_buckets, max_distance):
    config = TextConfig(vocab_size=4, dim=8, dim_attn=8, dim_ffn=8, num_heads=2, num_layers=1)
    config = TextConfig(**{**vars(config), "num_buckets": num_buckets, "max_distance": max_distance})
    attention = transformers_encoder(config).encoder.block[0].layer[0].SelfAttention
    distance = torch.arange(-599, 600)
    thresholds = bucket_thresholds(num_buckets, max_distance)
    ours = distance_buckets(600, num_buckets, thresholds, torch.device("cpu"))
    theirs = attention._relative_position_bucket(distance)
    # float32 logarithms put a threshold that is a whole number on either side of it; ours is exact
    assert (ours == theirs).float().mean() > 0.99
    assert torch.equal(ours[distance.abs() < 16], theirs[distance.abs() < 16]) or num_buckets == 8
    if (num_buckets, max_distance) == (32, 128):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_bf16_is_no_further_from_fp32_than_transformers(pair):
    ids, mask = padded([20, 9], seed=4)
    full = pair[0](ids, mask)[mask]
    ours, theirs = (copy.deepcopy(model).bfloat16() for model in pair)
    result = ours(ids, mask)[mask]
    reference = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    assert result.dtype == torch.bfloat16
    assert (result - full).norm() < 1.2 * (reference - full).norm() < 0.1 * full.norm()


# ------------------------------------------------------------------------------------------------------------ tokenizer


def test_tokens_are_those_of_sentencepiece(proto):
    direct = sentencepiece.SentencePieceProcessor(model_proto=proto)
    tokenizer = Tokenizer(proto)
    for scene in SCENES[::97]:
        assert tokenizer.encode(scene.caption) == [*direct.encode(scene.caption), 1]
    assert tokenizer.encode("") == tokenizer.encode(" \n") == [1]
    assert len(tokenizer) == PIECES and tokenizer.proto == proto


def test_text_is_cleaned(proto):
    assert clean("  a\tred \n\n circle &amp;amp; a\u3000square&nbsp;&lt;b&gt; ") == "a red circle & a square <b>"
    tokenizer = Tokenizer(proto)
    assert tokenizer.encode("\n a   red&#32;circle\t") == tokenizer.encode("a red circle")
    assert tokenizer.encode("red \ud83d circle") == tokenizer.encode("red ? circle")


@settings(max_examples=16, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=()), max_size=80), limit=st.integers(1, 20))
def test_any_text_is_truncated_to_the_limit_and_ends(proto, text, limit):
    """Lone surrogates and control characters included."""
    whole, cut = Tokenizer(proto).encode(text), Tokenizer(proto, limit).encode(text)
    assert cut == [*whole[:-1][: limit - 1], 1]
    assert len(cut) <= limit and max(cut) < PIECES


def test_a_model_with_another_end_token_is_refused():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a red circle on a blue background"] * 9),
        model_writer=model,
        vocab_size=19,
        minloglevel=3,
    )
    with pytest.raises(ValueError, match="is 2, UMT5's is 1"):
        Tokenizer(model.getvalue())


def test_a_tokenizer_larger_than_the_embedding_is_refused(proto):
    small = UMT5Encoder(TextConfig(vocab_size=PIECES - 1, dim=8, dim_attn=8, dim_ffn=8, num_heads=2, num_layers=1))
    with pytest.raises(ValueError, match=rf"{PIECES} pieces.* {PIECES - 1} rows"):
        TextEncoder(small, Tokenizer(proto))


# ------------------------------------------------------------------------------------------------------ prompts to rows

CAPTIONS = st.sampled_from([scene.caption for scene in SCENES] + ["", "blue", "Ünïcode 你好"])


@settings(max_examples=12, deadline=None)
@given(prompts=st.lists(CAPTIONS, min_size=1, max_size=4))
def test_rows_do_not_depend_on_neighbours(text, prompts):
    rows = text.encode(prompts)
    lengths = [len(text.tokenizer.encode(prompt)) for prompt in prompts]
    assert rows.shape == (len(prompts), max(lengths), SMALL.dim) and not rows.requires_grad
    for row, length, prompt in zip(rows, lengths, prompts, strict=True):
        torch.testing.assert_close(row[:length], text.encode([prompt])[0], rtol=0, atol=2e-5)
        assert not row[length:].any()


# ----------------------------------------------------------------------------------------------------------- key tables


def test_names_map_one_to_one(pair):
    ours, theirs = pair
    names = set(theirs.state_dict()) - {"encoder.embed_tokens.weight"}
    table = hf_text_names(names)
    assert set(table) == names
    assert sorted(table.values()) == sorted(ours.state_dict())
    both = hf_text_names(names | {"encoder.embed_tokens.weight", "spiece_model", "scaled_fp8"})
    assert both == {**table, "encoder.embed_tokens.weight": "token_embedding.weight"}


@pytest.mark.parametrize("config", [SMALL, UMT5_XXL], ids=["small", "xxl"])
def test_config_is_read_from_shapes(config):
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in UMT5Encoder(config).named_parameters()}
    assert text_config({**shapes, "spiece_model": (9,)}, {}) == config
    assert text_config(shapes, {"relative_attention_max_distance": "64"}).max_distance == 64
