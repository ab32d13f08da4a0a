"""Prompts over time: what frames attend to, in the model and in runs, which texts are made, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.sampling.test_denoise import EXPERTS, TEXT, run, small_dit
from tests.tensors import draw
from wan_core.config import (
    NagOptions,
    OptionError,
    PromptAt,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
    check_prompts,
)
from wan_core.models.wan import layers
from wan_core.models.wan.families import TASKS
from wan_core.models.wan.layers import biased_attention
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.models.wan.runners import ForwardInfo
from wan_core.sampling.build import ModelFacts, PlanRequest, build_plan
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.control import with_nag
from wan_core.sampling.plan import make_plan
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles
from wan_core.sampling.texts import TimedText, first_latent, text_of_frames

DATA = Path(__file__).parents[1] / "models" / "data" / "prompt_relay.safetensors"
SCENES = (PromptAt(frame=0, text="one"), PromptAt(frame=8, text="two"), PromptAt(frame=20, text="three"))
# Of 7 latent frames, the first 3 follow the first two rows of the text, the others the next three.
STARTS = (0, 3)
PENALTY = torch.zeros(1, 7, 5)
PENALTY[0, :, :2], PENALTY[0, :, 2:] = torch.tensor(TimedText("", ("a", "b"), STARTS).penalties(7)).T[:, :, None]
NOISE = draw_noise(7, (1, 16, 7, 4, 6))
TIMED = replace(TEXT, penalty=PENALTY)


@pytest.mark.parametrize("tokens_at_once", [7, 4096])
@pytest.mark.parametrize(
    ("name", "starts", "spans"),
    [("two", (0, 2), ((2, 5), (5, 9))), ("three", (0, 1, 4), ((0, 3), (3, 5), (5, 11)))],
)
def test_equals_the_authors_code(name, starts, spans, tokens_at_once, monkeypatch):
    """Their cross-attention of Wan 2.2 with `segment_intervals`, run on these queries, keys and values: two videos of 6
    latent frames of 2 x 2 tokens, in float32."""
    monkeypatch.setattr(layers, "NAG_TOKENS", tokens_at_once)
    q, k, v = draw(2, 24, 2, 8, seed=1), draw(2, 11, 2, 8, seed=2), draw(2, 11, 2, 8, seed=3)
    each, rows = torch.tensor(TimedText("", ("",) * len(starts), starts).penalties(6)), torch.zeros(2, 6, 11)
    for number, span in enumerate(spans):
        rows[:, :, slice(*span)] -= each[:, number, None]
    bias = PreparedText((), bias=rows).token_bias((6, 2, 2), None, 24)
    torch.testing.assert_close(biased_attention(q, k, v, bias), load_file(DATA)[name], atol=1e-5, rtol=0)


def test_penalties():
    """Nothing inside a range, a thousandth of the weight two latent frames beyond it."""
    rows = torch.tensor(TimedText("", ("a", "b", "c"), (0, 2, 3)).penalties(6))
    assert (rows == 0).int().tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1]]
    assert float(rows[3, 0].neg().exp()) == pytest.approx(1e-3) and float(rows[4, 0].neg().exp()) < 1e-6
    assert rows[0, 1] == rows[3, 0] and TimedText("", ("a",), (0,)).penalties(3) == [[0.0]] * 3


def test_tokens_have_the_bias_of_their_frame():
    """In any order, in shards, and with pictures in front of the video."""
    text = PreparedText((), bias=torch.arange(3.0).view(1, 3, 1))
    assert text.token_bias((3, 1, 2), None, 6).frames.tolist() == [0, 0, 1, 1, 2, 2]
    assert text.token_bias((3, 1, 2), torch.tensor([5, 2, 0]), 3).frames.tolist() == [2, 1, 0]
    assert text.token_bias((4, 1, 2), None, 8).frames.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert PreparedText(()).token_bias((3, 1, 2), None, 6) is None


def test_a_text_that_no_frame_may_read_has_no_influence():
    """Rows with a large penalty everywhere might as well be other rows; and none changes nothing but for rounding."""
    model, x, time = small_dit(), NOISE, torch.full((1,), 900.0)
    bias = torch.zeros(1, 7, 8)
    text = model.prepare_text(TEXT.cond)
    torch.testing.assert_close(model(x, time, text._replace(bias=bias)), model(x, time, text), atol=1e-5, rtol=0)
    bias[:, :, 2:5] = -1e4
    other = model.prepare_text(torch.cat([TEXT.cond[:, :2], 5 * TEXT.cond[:, 2:]], 1))._replace(bias=bias)
    assert torch.equal(model(x, time, text._replace(bias=bias)), model(x, time, other))
    assert not torch.equal(model(x, time, text._replace(bias=bias)), model(x, time, text))


@pytest.mark.parametrize("batch", [1, 2])
def test_both_ways_of_guidance_are_the_same_run(batch):
    noise = draw_noise(3, (batch, *NOISE.shape[1:]))
    plan = make_plan(steps=4, guidance_high=3.0, guidance_low=2.0)
    latents = run(plan, TIMED, noise)
    torch.testing.assert_close(run(plan, TIMED, noise, batched=True), latents, atol=1e-5, rtol=0)
    assert not torch.allclose(latents, run(plan, TEXT, noise), atol=1e-3)


def test_the_negative_prompt_is_read_by_all_frames():
    """Its forward is that of a run without prompts over time, and so is what NAG leads away from."""
    seen = {}

    class Noting(WanModel):
        def forward(self, x, timestep, context, info=None, **inputs):
            seen[info.branches] = context.bias
            return super().forward(x, timestep, context, info, **inputs)

    model = Noting(EXPERTS["high"].config).requires_grad_(False)
    run(make_plan(steps=1, guidance_high=3.0), TIMED, NOISE, lambda _: model)
    assert seen.keys() == {("cond",), ("uncond",)}
    assert seen["uncond",] is None and torch.equal(seen["cond",][0, :, :5], -PENALTY[0])
    nag = with_nag(make_plan(steps=2, guidance_high=1.0, guidance_low=1.0), NagOptions())
    assert not torch.allclose(run(nag, TIMED, NOISE), run(nag, TEXT, NOISE), atol=1e-3)


@pytest.mark.parametrize(
    "skip",
    [
        SkipOptions(sparse=SparseOptions(sparsity=0.5, kernel="math")),
        SkipOptions(taylorseer=TaylorSeerOptions(interval=2)),
    ],
)
def test_sparse_and_cached_runs(skip):
    """They are near the full run, and follow the prompts over time."""
    plan = make_plan(steps=12, guidance_high=1.0, guidance_low=1.0)
    faster = skip_forwards(plan, skip, None)
    noise = draw_noise(5, (1, 16, 7, 16, 16))
    latents, usual = run(faster, TIMED, noise), run(plan, TIMED, noise)
    assert latents.isfinite().all() and not torch.equal(latents, run(faster, TEXT, noise))
    assert float((latents - usual).norm() / usual.norm()) < 0.2


def test_tiles_keep_the_frames_of_tokens():
    """Sparse attention orders the tokens; here it reads nearly all keys."""
    model, x, time = small_dit(), draw_noise(5, (1, 16, 7, 16, 16)), torch.full((1,), 900.0)
    text = model.prepare_text(TEXT.cond)._replace(bias=-torch.nn.functional.pad(PENALTY, (0, 3)))
    expected = model(x, time, text)
    with in_tiles(model, SparseTiles(model, SparseOptions.parse("0.001"), (7, 8, 8))):
        output = model(x, time, text, ForwardInfo(sparsity=0.001))
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(expected, model(x, time, text._replace(bias=None)), atol=1e-3)


def test_the_text_of_a_video_and_of_its_clips():
    whole = text_of_frames("a dog.", SCENES, 0, 33)
    assert whole == TimedText("a dog.", ("one", "two", "three"), (0, 2, 5)) and whole.changes
    assert whole.prefixes == ["a dog.", "a dog. one", "a dog. one two", "a dog. one two three"]
    assert text_of_frames("", SCENES, 8, 17) == TimedText("", ("two",), (0,))
    assert text_of_frames("", SCENES, 13, 26) == TimedText("", ("two", "three"), (0, 2))
    assert text_of_frames("", SCENES, 13, 26).prefixes == ["", "two", "two three"]
    plain = text_of_frames("a  dog ", (), 0, 9)
    assert plain.text == "a  dog " and not plain.changes
    assert [first_latent(frame) for frame in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((4, 8), "the first begins at frame 0"),
        ((0, 20, 8), "in the order of their frames"),
        ((0, 0), "in the order of their frames"),
        ((0, 3), "at least 4 frames"),
        ((0, 81), "for a video of 81 frames, which are 0 to 80"),
    ],
)
def test_prompts_that_are_refused(starts, message):
    with pytest.raises(OptionError, match=message):
        check_prompts(starts, 81)
    task = TASKS["t2v-A14B"]
    with pytest.raises(OptionError, match=message):
        build_plan(PlanRequest(prompt_starts=starts), ModelFacts(task=task, dit=None, vae=task.vae))


def test_who_takes_them():
    for task in TASKS.values():
        request, facts = PlanRequest(prompt_starts=(0, 8)), ModelFacts(task=task, dit=None, vae=task.vae)
        if task.family in ("wan", "fun-control", "camera"):
            plan = build_plan(request, facts)
            assert plan.prompts is not None and "prompts from frames 0, 8" in plan.table()
            assert plan.as_dict()["prompts"] == [0, 8]
        else:
            with pytest.raises(OptionError, match="takes one prompt for the whole video: leave the prompts"):
                build_plan(request, facts)


def test_conditioning_survives_the_way_to_workers():
    unpacked = Conditioning.of(TIMED.flat())
    assert torch.equal(unpacked.penalty, PENALTY)
