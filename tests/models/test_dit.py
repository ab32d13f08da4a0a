"""The transformer against diffusers' WanTransformer3DModel, on tiny random weights in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from diffusers import WanTransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st

import wan_core
from tests.reference_models import diffusers_transformer
from wan_core.models.wan import layers
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.plain import diffusers_names
from wan_core.models.wan.model import WanModel

SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=256, ffn_dim=320, num_heads=2, num_layers=2, text_dim=48, text_len=32
)
KINDS = {
    "t2v": SMALL,
    "i2v": dataclasses.replace(SMALL, in_channels=36),
    "ti2v": dataclasses.replace(SMALL, in_channels=48, out_channels=48),
    "i2v with CLIP": dataclasses.replace(SMALL, in_channels=36, image_dim=40, text_len=512),
}


def random_pair(config: DiTConfig) -> tuple[WanModel, WanTransformer3DModel]:
    """The same random weights in diffusers' module and in ours; every parameter random, biases and modulations too."""
    torch.manual_seed(0)
    theirs = diffusers_transformer(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.06)
    names = diffusers_names(theirs.state_dict().keys())
    assert names is not None
    ours = family_of(config).model_class(config)(config).eval()
    ours.load_state_dict({names[name]: tensor for name, tensor in theirs.state_dict().items()}, strict=True)
    return ours, theirs


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    return request.param, *random_pair(KINDS[request.param])


@torch.no_grad()
@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 2),
    T=st.integers(1, 5),
    Y=st.integers(1, 5),
    X=st.integers(1, 6),
    text=st.integers(1, 80),  # also more rows than the text encoder gives
    seed=st.integers(0, 99),
)
def test_matches_diffusers(pair, batch, T, Y, X, text, seed):
    kind, ours, theirs = pair
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, ours.config.in_channels, T, 2 * Y, 2 * X, generator=generator)
    context = torch.randn(batch, text, ours.config.text_dim, generator=generator)
    timestep = torch.rand(batch, generator=generator) * 1000
    theirs_timestep = timestep
    if kind == "ti2v":  # the first latent frame is known: its tokens have timestep 0
        timestep = timestep[:, None].repeat(1, T)
        timestep[:, 0] = 0
        theirs_timestep = timestep.repeat_interleave(Y * X, dim=1)
    padded = torch.nn.functional.pad(context, (0, 0, 0, max(0, ours.config.text_len - text)))
    image = None
    if ours.config.image_dim is not None:
        # diffusers takes the last 512 rows for the text's, whatever the model says
        context = torch.randn(batch, 512, ours.config.text_dim, generator=generator)
        padded, image = context, torch.randn(batch, 257, ours.config.image_dim, generator=generator)
    expected = theirs(x, theirs_timestep, padded, encoder_hidden_states_image=image, return_dict=False)[0]
    prepared = ours.prepare_text(context, image)
    assert (ours(x, timestep, prepared) - expected).abs().max() <= 1e-4
    if image is None:
        torch.testing.assert_close(ours(x, timestep, prepared), ours(x, timestep, context), rtol=0, atol=0)


def test_bf16_stays_close_to_fp32():
    ours, _ = random_pair(SMALL)
    generator = torch.Generator().manual_seed(1)
    x, context = torch.randn(1, 16, 3, 6, 8, generator=generator), torch.randn(1, 9, 48, generator=generator)
    timestep = torch.tensor([999.0])
    with torch.no_grad():
        full = ours(x, timestep, context)
        half = ours.bfloat16()(x, timestep, context)
    assert half.dtype == torch.float32
    assert (half - full).norm() / full.norm() < 0.02


@torch.no_grad()
def test_rows_of_text_that_come_twice_change_nothing(pair):
    """Attention to all rows is attention to each of them, also beside the tokens of an image."""
    _, ours, _ = pair
    draw, config = torch.Generator().manual_seed(2), ours.config
    x, timestep = torch.randn(1, config.in_channels, 2, 4, 6, generator=draw), torch.tensor([500.0])
    text = torch.randn(1, config.text_len, config.text_dim, generator=draw)
    image = {} if config.image_dim is None else {"image": torch.randn(1, 257, config.image_dim, generator=draw)}
    once, twice = (ours(x, timestep, rows, **image) for rows in (text, torch.cat([text, text], 1)))
    torch.testing.assert_close(twice, once, atol=2e-5, rtol=1e-4)
    more = ours(x, timestep, torch.cat([text, -text], 1), **image)
    assert (more - once).abs().max() > 1e-3


@pytest.mark.parametrize(("shape", "width"), [((1, 16, 1, 3, 4), 48), ((1, 15, 1, 4, 4), 48), ((1, 16, 1, 4, 4), 47)])
def test_wrong_shapes_say_what_is_expected(shape, width):
    with pytest.raises(ValueError, match="this model takes"):
        WanModel(SMALL)(torch.zeros(shape), torch.zeros(1), torch.zeros(1, 4, width))


@pytest.mark.parametrize("frames", [1, 3])
def test_the_head_takes_tokens_in_parts(frames, monkeypatch):
    """The same numbers whatever the size of the parts, with a timestep for each sample or for each latent frame."""
    torch.manual_seed(0)
    model = WanModel(SMALL).eval()
    x = torch.randn(2, 16, 3, 6, 4)
    time = torch.tensor([700.0, 300.0]) if frames == 1 else torch.rand(2, 3) * 1000
    with torch.no_grad():
        whole = model(x, time, torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1)))
        monkeypatch.setattr(layers, "HEAD_TOKENS", 7)
        parts = model(x, time, torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


def test_a_loaded_transformer_says_its_family_and_takes_its_inputs_by_name():
    """`load_dit` from a state dict; CLIP features by name, texts as rows or as a list of different lengths."""
    for kind, config in KINDS.items():
        ours, _ = random_pair(config)
        loaded = wan_core.load_dit(ours.state_dict(), {"num_heads": 2, "text_len": config.text_len})
        assert loaded.family == "wan" and loaded.config == config, kind
        x, time = torch.randn(2, config.in_channels, 2, 4, 4), torch.tensor([3.0, 700.0])
        texts = [torch.randn(5, config.text_dim), torch.randn(9, config.text_dim)]
        inputs = {} if config.image_dim is None else {"image": torch.randn(2, 257, config.image_dim)}
        padded = torch.stack([torch.nn.functional.pad(one, (0, 0, 0, 9 - len(one))) for one in texts])
        with torch.no_grad():
            expected = ours(x, time, ours.prepare_text(padded, **inputs))
            assert torch.equal(loaded(x, time, padded, **inputs), expected)
            torch.testing.assert_close(loaded(x, time, texts, **inputs), expected, rtol=0, atol=1e-6)
