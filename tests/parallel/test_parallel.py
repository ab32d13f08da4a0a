"""Ranks over gloo: every mesh computes what one rank computes."""

from __future__ import annotations

import re
from unittest import mock

import parallel_checks
import parallel_ranks
import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st
from parallel_ranks import Ranks
from PIL import Image

from tests.parallel.equal_ranks import MAGCACHE, ROUNDING, SPARSE, SQUARE, TALL, equal_on_all, together
from tests.pipeline import test_sound_clips
from wan_core.config import PromptAt
from wan_core.pipeline.load import TINY

GRIDS = {"animate": [(1, 4, 3, 2)], "animate2": [(1, 4, 3, 2)], "s2v": [(1, 3, 4, 5)]}
CONTROLLED = [(1, 4, 3, 2), (1, 1, 3, 3), (1, 2, 1, 5)]


@pytest.mark.parametrize("name", [*GRIDS, "vace", "fun-control", "fun-control 2.1", "camera"])
def test_families_equal_one_rank(ranks, name):
    """24 tokens of 4 frames; of S2V 60 of 3, and 48 beside the video's. Shards end inside of frames, and 2 heads are
    split. Control videos and cameras find the tokens of each rank, and one rank begins with the reference."""
    changed = {"log_scale": -1.3} if name == "animate2" else {}
    for grid in GRIDS.get(name, CONTROLLED):
        for error, counts in ranks.ask("family_forward", mesh="1x2x2", name=name, grid=grid, **changed):
            assert error < ROUNDING and counts > 1e-2


@settings(max_examples=14, deadline=None, derandomize=True)
@over(
    mesh=st.sampled_from(["1x1x2", "1x2x1", "1x2x2"]),
    name=st.sampled_from(["vace", "fun-control", "camera", "camera 2.1", "s2v"]),
    grid=st.tuples(st.just(1), st.integers(1, 4), st.integers(1, 5), st.integers(2, 5)),
    motion=st.booleans(),
)
def test_any_grid_equals_one_rank(ranks, mesh, name, grid, motion):
    """Groups of S2V's modulation whose lengths share a large divisor, or none."""
    if name == "s2v":
        grid = (1, grid[1], grid[2] + 3, grid[3] + 3)
    for error, counts in ranks.ask("family_forward", mesh=mesh, name=name, grid=grid, motion=motion):
        assert error < ROUNDING and counts > 1e-2


@pytest.mark.parametrize("mesh", ["1x1x3", "1x2x2", "2x3x1"])
def test_a_trajectory_equals_that_of_one_rank(ranks, alone, mesh):
    """The embedded model has 4 heads, so 3 ranks have 2, 1 and 1; 50 tokens go into 3 or 4 parts that differ."""
    options = {"request": {"steps": 2, "width": 80, "height": 80, "frames": 5}, "decode": True}
    answers = ranks.ask("trajectory", mesh=mesh, **options)
    equal_on_all(answers, alone(**options))
    assert answers[0][1].shape == (5, 80, 80, 3)
    assert ["text_encoder" in said["held"] for _, _, said in answers] == [False] * (len(answers) - 1) + [True]
    assert {said["mesh"] for _, _, said in answers} == {mesh}


LAYERS = ("layers2", "layers3", "layers4")


@pytest.mark.parametrize(
    ("mesh", "changed"),
    [
        ("layers2", {"steps": 4, "guidance_low": 1.0}),
        ("layers3", {"steps": 3, "frames": 1}),
    ],
)
def test_a_layer_pipeline_equals_one_rank_bit_for_bit(ranks, alone, mesh, changed):
    """Steps with guidance and without."""
    request = {"width": 80, "height": 80, "frames": 5, "guidance_mode": "sequential", **changed}
    wanted = alone(request=request)
    answers = together(ranks, mesh=mesh, request=request)
    assert all(torch.equal(latents, wanted[0]) for latents, _, _ in answers)
    assert {said["mesh"] for _, _, said in answers} == {mesh}


@pytest.mark.parametrize("mesh", LAYERS)
def test_each_rank_of_a_layer_pipeline_holds_its_blocks_alone(ranks, mesh):
    blocks_of_ranks = ranks.ask("held_blocks", mesh=mesh)
    layers = sum(len(blocks) for blocks in blocks_of_ranks)
    assert sorted(block for blocks in blocks_of_ranks for block in blocks) == list(range(layers)), (
        "each block on one rank"
    )
    assert max(map(len, blocks_of_ranks)) - min(map(len, blocks_of_ranks)) <= 1


COLOURS = ((0, "red"), (4, "green"))
SCENES = tuple(PromptAt(frame=n, text=f"a {colour} square moving up on a white background") for n, colour in COLOURS)
# Some steps have one branch only; MagCache's residuals of it must be where it runs next.
UNGUIDED = {"steps": 10, "magcache": MAGCACHE, **SQUARE, "frames": 5}
REQUESTS = {
    "105 tokens": (("2x2x1",), {"steps": 10, "magcache": MAGCACHE, **TALL}),
    # A rank has all tokens of its heads, in the order of the tiles; residuals are kept beneath that order.
    # At seed 1 two blocks are worth the same but for 2e-6 of their share, less than a share's rounding: the ranks read
    # the one and one rank the other, in 1 of 359,552 choices, and latents differ by 5e-4. Seed 4 has no such tie.
    "sparse": (("2x1x2",), {"steps": 10, "sparse": SPARSE, "magcache": MAGCACHE, "seed": 4, **TALL}),
    "prompts over time": (("2x2x1",), {"steps": 8, "magcache": MAGCACHE, "prompt": "", "prompts_at": SCENES, **TALL}),
    "sparse prompts over time": (("1x1x3",), {"steps": 4, "sparse": SPARSE, "prompts_at": SCENES, "seed": 4, **TALL}),
    "prompts over time in layers": (
        ("layers2",),
        {"steps": 4, "prompts_at": SCENES, **TALL, "guidance_mode": "sequential"},
    ),
    "guidance of one expert": (("2x1x1",), {**UNGUIDED, "guidance_low": 1.0}),
}


@pytest.mark.parametrize(  # by mesh, since ranks keep the models of the one that they have
    ("mesh", "name"), sorted((mesh, name) for name, (meshes, _) in REQUESTS.items() for mesh in meshes)
)
def test_a_request_equals_one_rank(ranks, alone, mesh, name):
    _, request = REQUESTS[name]
    wanted = alone(request=request)
    answers = together(ranks, mesh=mesh, request=request)
    equal_on_all(answers, wanted)
    notes = [note for note in wanted[2]["notes"] if note.startswith("forwards")]
    assert all(set(notes) <= set(said["notes"]) for _, _, said in answers)
    for changed in {"prompts_at"} & set(request):
        plain = {option: value for option, value in request.items() if option != changed}
        assert parallel_checks.relative(wanted[0], alone(request=plain)[0]) > 0.01


@pytest.mark.parametrize("mesh", ["1x1x3", "1x2x2"])
def test_caches_keep_a_shard(ranks, mesh):
    assert all(cached == mine and same for cached, mine, same in ranks.ask("cached_tokens", mesh=mesh))


@pytest.mark.parametrize("mesh", ["layers2", "1x3x1"])
def test_known_pictures_are_encoded_as_one_rank_does(ranks, alone, tmp_path, mesh):
    """To the bit: sampling makes much of what rounding changes in a known picture. Layers on their own ranks
    round nothing else in another order, so their latents have one rank's bits."""
    pictures = {"image": str(tmp_path / "first.png"), "last_image": str(tmp_path / "last.png")}
    for seed, path in enumerate(pictures.values()):
        pixels = torch.rand(96, 96, 3, generator=torch.Generator().manual_seed(seed)) * 255
        Image.fromarray(pixels.byte().numpy()).save(path)
    request = {"steps": 2, "guidance_mode": "sequential", **pictures}
    answers, wanted = together(ranks, mesh=mesh, request=request), alone(request=request)
    equal_on_all(answers, wanted)
    assert torch.equal(answers[0][0], wanted[0]) or mesh == "1x3x1"


def test_compiled_blocks(ranks, alone):
    """All that torch makes of a block before it writes kernels; those are the GPUs' tests'. One expert runs both
    steps, so that it alone is compiled. Attention, where a mesh makes a difference, is not."""
    request = {"steps": 2, "boundary": 0.01, "guidance_mode": "sequential", "width": 80, "height": 80, "frames": 5}
    equal_on_all(together(ranks, mesh="1x2x1", request=request, compile="aot_eager"), alone(request=request))


@pytest.mark.parametrize("mesh", ["1x1x3", "1x3x1", "1x1x4", "1x4x1", "1x2x2"])
@pytest.mark.parametrize(
    ("heads", "tokens", "batch", "backend"),
    [(5, 17, 1, "math"), (4, 13, 2, "sdpa"), (40, 19, 1, "math"), (8, 16, 2, "sdpa")],
)
def test_attention_with_any_heads_and_tokens(ranks, mesh, heads, tokens, batch, backend):
    arguments = {"mesh": mesh, "heads": heads, "tokens": tokens, "batch": batch, "backend": backend, "seed": tokens}
    assert max(ranks.ask("attention", **arguments)) < 2e-6


@pytest.mark.parametrize("mesh", ["1x1x3", "1x3x1", "1x2x2"])
def test_an_attention_moves_no_more_than_it_must(ranks, mesh):
    """Ulysses: the heads of others, and their tokens of the output. Ring: every part but the receiver's own. Bytes are
    those that the benchmark counts."""
    for counted, formula in ranks.ask("traffic", mesh=mesh, heads=5, tokens=17):
        assert counted == formula > 0


@pytest.mark.parametrize("mesh", ["1x1x4", "1x4x1", "1x2x2"])
def test_fp8_attention_agrees_on_scales_and_means(ranks, mesh):
    """Without `agree`, the sharded error is ten times the whole one."""
    for whole, sharded, _ in ranks.ask("fp8_forward", mesh=mesh):
        assert sharded < 1.6 * whole


@pytest.mark.parametrize(("mesh", "grid"), [("1x1x3", (5, 3, 7)), ("1x2x2", (3, 16, 40)), ("1x4x1", (4, 1, 3))])
def test_frames_with_timesteps_of_their_own(ranks, mesh, grid):
    assert max(ranks.ask("frames_with_own_timesteps", mesh=mesh, grid=grid)) < 2e-6


def test_branches_run_where_they_always_run(ranks):
    answers = ranks.ask("branches", mesh="2x1x1")
    assert [answer[0] for answer in answers] == [["cond", "cond"], ["uncond"]]
    assert all(answer[1:] == [[[1.0, 1.0]], [[2.0, 2.0]], [[1.0, 1.0]]] for answer in answers)


@pytest.mark.parametrize("how", ["raise", "die", "hang"])
def test_a_rank_that_fails_is_reported_and_the_next_question_answered(how):
    ranks = Ranks(2)
    try:
        messages = {
            "raise": "rank 1: .*as a test wants it",
            "die": "rank 1: .*exit code 3",
            "hang": "rank 1 .*in fails",
        }
        ranks.ask("places", mesh="1x1x2")
        with mock.patch.object(parallel_ranks, "GRACE", 1.0), pytest.raises(AssertionError) as fault:
            ranks.ask("fails", mesh="1x1x2", rank=1, how=how, seconds=60.0 if how != "hang" else 3.0)
        assert re.search(messages[how], str(fault.value), re.DOTALL)
        assert ranks.ask("places", mesh="1x1x2") == [(0, 0, 0, 0, 2), (0, 0, 1, 1, 2)]
    finally:
        ranks.close()


@pytest.mark.parametrize(("heads", "tokens"), [(4, 256), (5, 199)])
@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x2"])
def test_attention_in_bf16_is_as_exact_as_whole(ranks, mesh, heads, tokens):
    """The check of the GPUs' tests."""
    for whole, sharded in ranks.ask(
        "gpu_attention", mesh=mesh, backend="sdpa", heads=heads, tokens=tokens, device="cpu"
    ):
        assert sharded < 1.3 * whole + 1e-3


@pytest.mark.parametrize(
    ("name", "how", "mesh"),
    [
        ("vace", "magcache", "1x2x2"),
        ("vace", "part", "1x2x2"),
        ("fun-control", "sparse", "1x1x4"),
        ("camera", "magcache", "1x2x2"),
        ("s2v", "magcache", "1x2x2"),
        ("s2v", "sparse", "2x1x2"),  # does not go around a ring
    ],
)
def test_runs_that_skip_equal_one_rank(ranks, name, how, mesh):
    """And runs with control of a part of them. S2V hears nothing in its unconditional branch."""
    grid = (1, 2, 6, 7) if name == "s2v" else (1, 3, 4, 5)
    for error, counts in ranks.ask("family_run", mesh=mesh, name=name, how=how, grid=grid):
        assert error < ROUNDING and counts > (1e-6 if name == "s2v" else 1e-4)


folder = test_sound_clips.folder  # a fixture


def test_clips_of_a_sound_on_ranks_equal_one_rank(ranks, folder):
    """A long video, of which each clip goes on from the last."""
    files = {name: str(TINY / f"{name}.safetensors") for name in ("text_encoder", "vae")}
    files |= {"high": str(folder / "small.safetensors"), "audio_encoder": str(folder / "wav2vec2.safetensors")}
    request = {"reference": str(folder / "reference.png"), "audio": str(folder / "speech.wav"), "frames": 20}
    request |= {"steps": 1, "width": 64, "height": 64, "clip_frames": test_sound_clips.FRAMES, "guidance_high": 2.0}
    asked = {"model": None, "request": request, **files}
    latents, frames, _ = parallel_checks.trajectory(None, **asked)
    answers = ranks.ask("trajectory", mesh="2x1x2", **asked)
    for one, shown, said in answers:
        assert torch.equal(one, answers[0][0]) and said["mesh"] == "2x1x2"
        assert parallel_checks.relative(one, latents) < 1e-4
        assert int((shown.int() - frames.int()).abs().max()) <= 1


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1x1x3", {"config": "2.1", "rows": 5, "columns": 9}),
        ("1x1x3", {"config": "2.2", "rows": 7, "columns": 4, "frames": 2, "last": True}),
        ("2x2x1", {"config": "2.1", "rows": 4, "columns": 5, "chunk": None, "last": True}),
        ("1x1x4", {"config": "2.2", "rows": 6, "columns": 6, "chunk": 2}),
        ("1x1x4", {"config": "2.1", "rows": 2, "columns": 3}),  # too small to cut
        ("1x1x3", {"config": "2.1", "rows": 5, "columns": 9, "batch": 1, "passes": False}),
        ("1x1x3", {"config": "2.1", "rows": 9, "columns": 5, "batch": 1, "passes": True, "last": True}),
        ("1x1x4", {"config": "2.2", "rows": 6, "columns": 6, "chunk": 2, "batch": 1, "passes": True}),
    ],
)
def test_a_picture_in_strips(ranks, mesh, options):
    """Every value, edges between strips included: a missing or doubled halo is an error of a tenth, not of 1e-5. The
    first rank encodes the whole picture, so there the bits are those of one GPU."""
    for decoded, encoded in ranks.ask("vae", mesh=mesh, **options):
        assert decoded < ROUNDING and encoded == 0.0
