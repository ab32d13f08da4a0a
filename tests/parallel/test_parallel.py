"""Ranks over gloo: every mesh computes what one rank computes."""

from __future__ import annotations

import math
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks import their checks by these names, and so must we
import parallel_checks
import parallel_loading
import parallel_ranks
from parallel_ranks import Ranks
from PIL import Image
from safetensors.torch import save_file

from tests import gguf_files, int8_files
from tests.pipeline import test_sound_clips
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.save import write_safetensors
from wan_core.config import LoadOptions, OptionError, PromptAt
from wan_core.execution.report import Report
from wan_core.parallel.mesh import Mesh
from wan_core.parallel.weights import SMALL
from wan_core.pipeline.load import TINY, load_models
from wan_core.pipeline.reading import load_parts
from wan_core.pipeline.sources import find_models

MESHES = ("1x1x2", "2x1x1", "1x1x3", "1x3x1", "1x2x2", "2x1x2", "2x3x1")
ROUNDING = 3e-5  # of the largest latent, over eight blocks and several steps
MAGCACHE = {"threshold": 0.3, "max_skips": 2, "retention": 0.2}


@pytest.fixture(scope="module")
def ranks():
    started = Ranks(6)
    yield started
    started.close()


@pytest.fixture(scope="module")
def alone():
    """What one rank makes of a request, made once."""
    trajectories: dict[str, tuple[torch.Tensor, torch.Tensor, dict]] = {}

    def find(**options):
        options = {"decode": False, **options}
        key = repr(options)
        if key not in trajectories:
            trajectories[key] = parallel_checks.trajectory(None, **options)
        return trajectories[key]

    return find


def together(ranks, **options):
    """What every rank makes of a request but for its pictures, which are most of the work and the first test's."""
    return ranks.ask("trajectory", decode=False, **options)


def equal_on_all(answers, wanted, rounding: float = ROUNDING) -> None:
    """The same bits on every rank, and one rank's result but for rounding."""
    for latents, frames, _ in answers:
        assert torch.equal(latents, answers[0][0]) and torch.equal(frames, answers[0][1])
    assert parallel_checks.relative(answers[0][0], wanted[0]) < rounding
    if len(wanted[1]):
        assert int((answers[0][1].int() - wanted[1].int()).abs().max()) <= 1


GRIDS = {"animate": [(1, 4, 3, 2)], "animate2": [(1, 4, 3, 2)], "s2v": [(1, 3, 4, 5)]}
CONTROLLED = [(1, 4, 3, 2), (1, 1, 3, 3), (1, 2, 1, 5)]


@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x2"])
@pytest.mark.parametrize("name", [*GRIDS, "vace", "fun-control", "fun-control 2.1", "camera"])
def test_families_equal_one_rank(ranks, mesh, name):
    """24 tokens of 4 frames; of S2V 60 of 3, and 48 beside the video's. Shards end inside of frames, and 2 heads are
    split. Control videos and cameras find the tokens of each rank, and one rank begins with the reference."""
    changed = {"log_scale": -1.3} if name == "animate2" else {}
    for grid in GRIDS.get(name, CONTROLLED):
        for error, counts in ranks.ask("family_forward", mesh=mesh, name=name, grid=grid, **changed):
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


@pytest.mark.parametrize("mesh", ["1x1x2", "2x1x2"])
def test_sparse_attention_of_tokens_beside_the_video_equals_one_rank(ranks, mesh):
    for error, counts in ranks.ask("sparse_sound", mesh=mesh):
        assert error < ROUNDING and counts > 1e-4


@pytest.mark.parametrize("mesh", MESHES)
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
        ("layers3", {"steps": 4}),
        ("layers3", {"steps": 3, "frames": 1, "guidance_low": 1.0}),
        ("layers4", {"steps": 3, "frames": 1}),
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


SPARSE = {"sparsity": 0.75, "dense_steps": 0.25, "ramp": 0.0}
COLOURS = ((0, "red"), (4, "green"))
SQUARE = {"width": 80, "height": 80}
TALL = {"width": 80, "height": 112, "frames": 9}
SCENES = tuple(PromptAt(frame=n, text=f"a {colour} square moving up on a white background") for n, colour in COLOURS)
# Some steps have one branch only; MagCache's residuals of it must be where it runs next.
UNGUIDED = {"steps": 10, "magcache": MAGCACHE, **SQUARE, "frames": 5}
REQUESTS = {
    "105 tokens": (("1x1x3", "2x2x1"), {"steps": 10, "magcache": MAGCACHE, **TALL}),
    # A rank has all tokens of its heads, in the order of the tiles; residuals are kept beneath that order.
    # At seed 1 two blocks are worth the same but for 2e-6 of their share, less than a share's rounding: the ranks read
    # the one and one rank the other, in 1 of 359,552 choices, and latents differ by 5e-4. Seed 4 has no such tie.
    "sparse": (("1x1x3", "2x1x2"), {"steps": 10, "sparse": SPARSE, "magcache": MAGCACHE, "seed": 4, **TALL}),
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


def test_sparse_fp8_attention_takes_numbers_as_they_arrive(ranks, alone):
    """They arrive in FP8, which on a CPU one rank would not use: no further from the truth than both changes together,
    and the same on every rank."""
    request, options = {"steps": 4, "sparse": SPARSE}, {"attention": "math-fp8"}
    answers = together(ranks, mesh="1x1x2", request=request, **options)
    assert all(torch.equal(answer[0], answers[0][0]) for answer in answers)
    dense = alone(request={"steps": 4})[0]
    changes = alone(request=request)[0], alone(request={"steps": 4}, **options)[0]

    def distance(latents: torch.Tensor) -> float:
        return float((latents - dense).norm() / dense.norm())

    assert distance(answers[0][0]) < 1.5 * math.hypot(*map(distance, changes))


@pytest.mark.parametrize("mesh", ["1x1x3", "1x2x2"])
def test_caches_keep_a_shard(ranks, mesh):
    assert all(cached == mine and same for cached, mine, same in ranks.ask("cached_tokens", mesh=mesh))


@pytest.mark.parametrize("mesh", ["2x1x1", "layers2", "1x3x1"])
def test_known_pictures_are_encoded_as_one_rank_does(ranks, alone, tmp_path, mesh):
    """To the bit: sampling makes much of what rounding changes in a known picture. The first two meshes round nothing
    else in another order, so their latents have one rank's bits."""
    pictures = {"image": str(tmp_path / "first.png"), "last_image": str(tmp_path / "last.png")}
    for seed, path in enumerate(pictures.values()):
        pixels = torch.rand(96, 96, 3, generator=torch.Generator().manual_seed(seed)) * 255
        Image.fromarray(pixels.byte().numpy()).save(path)
    request = {"steps": 2, "guidance_mode": "sequential", **pictures}
    answers, wanted = together(ranks, mesh=mesh, request=request), alone(request=request)
    equal_on_all(answers, wanted)
    assert torch.equal(answers[0][0], wanted[0]) or mesh == "1x3x1"


@pytest.mark.parametrize(("mesh", "backend"), [("1x2x1", "eager"), ("1x1x2", "aot_eager")])
def test_compiled_blocks(ranks, alone, mesh, backend):
    """All that torch makes of a block before it writes kernels; those are the GPUs' tests'. One expert runs both
    steps, so that it alone is compiled."""
    request = {"steps": 2, "boundary": 0.01, "guidance_mode": "sequential", "width": 80, "height": 80, "frames": 5}
    equal_on_all(together(ranks, mesh=mesh, request=request, compile=backend), alone(request=request))


@pytest.mark.parametrize("mesh", ["1x1x3", "1x3x1", "1x3bx1", "1x1x4", "1x4bx1", "1x2x2", "1x2bx2"])
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


def test_weights_that_a_host_reads_once_are_equal_bit_for_bit(ranks):
    answers = ranks.ask("weights", mesh="1x1x3")
    assert [changed for changed, _ in answers] == [[]] * len(answers)
    total = answers[0][1]["stored"]
    assert sum(read["touched"] for _, read in answers) <= 1.05 * total


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A file of tensors of odd sizes, the bytes of those that are cut, and of those that are not."""
    path = tmp_path_factory.mktemp("odd") / "odd.safetensors"
    sizes = [value.numel() * value.element_size() for value in parallel_loading.write_odd(path).values()]
    return str(path), sum(n for n in sizes if n > SMALL), sum(n for n in sizes if n <= SMALL)


@pytest.mark.parametrize("mesh", ["1x1x2", "1x1x3"])
@pytest.mark.parametrize("limits", [{}, {"ahead": 1}, {"ahead": 300_000, "piece": 10_007}], ids=repr)
def test_ranks_read_a_part_each_by_threads_and_have_what_one_reads(ranks, odd, mesh, limits):
    path, cut, uncut = odd
    answers = ranks.ask("staged_weights", mesh=mesh, path=path, **limits)
    assert [(changed, unread) for changed, _, unread in answers] == [([], 0)] * len(answers)
    read = [count for _, count, _ in answers]
    assert sum(read) == cut + len(read) * uncut  # nothing twice but what is small
    assert max(read) - min(read) <= 4 * 16 * len(read)  # of four tensors, up to the rounding of parts


def test_ranks_that_read_by_threads_may_stop_early(ranks, odd):
    """Whatever is on its way, none waits for another, and the next reading is sound."""
    for taken in (0, 1, 4):
        answers = ranks.ask("staged_weights", mesh="1x1x2", path=odd[0], ahead=1_000_000, piece=9_001, taken=taken)
        assert [(changed, unread) for changed, _, unread in answers] == [([], 0)] * 2
    answers = ranks.ask("staged_weights", mesh="1x1x2", path=odd[0])
    assert [changed for changed, _, _ in answers] == [[]] * 2


def test_a_model_that_ranks_read_by_threads_is_that_of_one(ranks, tmp_path):
    assert ranks.ask("staged_model", mesh="1x1x3") == [[]] * 3
    state, meant, notes = int8_files.stored("rotated 256")
    write_safetensors(state, tmp_path / "int8.safetensors", notes)
    assert ranks.ask("staged_model", mesh="1x1x3", packed=str(tmp_path / "int8.safetensors")) == [[]] * 3
    gguf_files.write(tmp_path / "m.gguf", meant, gguf_files.matrices("Q8_0"), notes=int8_files.NOTES)
    assert ranks.ask("staged_model", mesh="1x1x3", packed=str(tmp_path / "m.gguf")) == [[]] * 3


@pytest.mark.parametrize("missing", ["all parts", "the last part"])
def test_a_rank_whose_part_is_missing_says_so_and_no_other_waits_for_ever(ranks, tmp_path, missing):
    path = tmp_path / "short.safetensors"
    write_safetensors({"values": torch.zeros(300_000, dtype=torch.uint8)}, path, {})
    arguments = {"path": str(path), "keep": 1000 if missing == "all parts" else 200_000, "timeout": 2.0}
    first, last = ranks.ask("truncated", mesh="1x1x2", **arguments)
    assert last.startswith("CheckpointError") and "become shorter" in last
    assert first.startswith("CheckpointError" if missing == "all parts" else "RuntimeError")


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


def test_experts_in_parts(ranks, alone):
    """Each rank holds its share of the blocks, and no more while nothing runs."""
    request = {"steps": 2, "width": 80, "height": 80, "frames": 5}
    equal_on_all(together(ranks, mesh="1x1x3", request=request, residency="shard"), alone(request=request))
    answers = ranks.ask("sharded_weights", mesh="1x1x3")
    assert [changed for _, changed in answers] == [[]] * 3
    blocks = sum(value.numel() * 4 for value in load_dit(TINY / "t2v_high.safetensors").blocks.state_dict().values())
    assert sum(count for count, _ in answers) == blocks and max(count for count, _ in answers) < 0.4 * blocks


@pytest.mark.parametrize(
    ("name", "how", "meshes"),
    [
        *((name, how, ("1x2x2",)) for name in ("vace", "fun-control", "camera") for how in ("magcache", "sparse")),
        ("vace", "part", ("1x2x2",)),
        ("s2v", "magcache", ("1x2x2", "2x1x2")),
        ("s2v", "sparse", ("2x1x2",)),  # does not go around a ring
    ],
)
def test_runs_that_skip_equal_one_rank(ranks, name, how, meshes):
    """And runs with control of a part of them. S2V hears nothing in its unconditional branch."""
    grid = (1, 2, 6, 7) if name == "s2v" else (1, 3, 4, 5)
    for mesh in meshes:
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


def test_weights_of_vace_blocks_are_sharded_too(ranks, tmp_path):
    path = tmp_path / "vace.safetensors"
    save_file(
        parallel_checks.draw_weights(parallel_checks.control_references.CONFIGS["vace"]), path, {"num_heads": "2"}
    )
    for error, unsharded in ranks.ask("sharded_vace", mesh="1x1x2", path=str(path)):
        assert error < ROUNDING and unsharded == []


@pytest.mark.parametrize("mesh", ["1x1x2", "2x1x2"])
def test_experts_that_are_read_at_once_are_those_of_the_files(ranks, mesh):
    for changed in ranks.ask("staged_together", mesh=mesh):
        assert changed == []


@pytest.mark.parametrize("in_order", [True, False])
def test_threads_that_load_work_on_the_device_of_the_rank(monkeypatch, in_order):
    """A new thread's current device is the first GPU: what is launched or drawn without naming one would go there."""
    here = threading.local()

    @contextmanager
    def current(device):
        here.device = device
        yield
        del here.device

    monkeypatch.setattr(torch.cuda, "device", current)
    device, main = torch.device("cuda", 1), threading.get_ident()

    def load(name, how):  # the rank's main thread has its device already
        return threading.get_ident() == main or getattr(here, "device", None) == device

    loaded = load_parts(["high", "text_encoder", "vae"], load, device, in_order=in_order)
    assert loaded == {"high": True, "text_encoder": True, "vae": True}


@pytest.mark.parametrize("options", [{"compile": "blocks"}, {"precision": "fp8-weights"}, {}])
def test_what_cannot_be_held_in_parts_is_refused(options):
    ranks = SimpleNamespace(
        device=torch.device("cpu"),
        sequence=SimpleNamespace(size=2 if options else 1),
        agree=float,
        mesh=Mesh(1, 1, 2),
        layers=SimpleNamespace(size=1),
    )
    load_options = LoadOptions(model="tiny", device="cpu", residency="shard", **options)
    with pytest.raises(OptionError, match="residency 'shard' is not available: "):
        load_models(find_models(load_options), load_options, Report(ranks.device), None, ranks)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1x1x3", {"config": "2.1", "rows": 5, "columns": 9}),
        ("1x1x3", {"config": "2.2", "rows": 7, "columns": 4, "frames": 2, "last": True}),
        ("2x2x1", {"config": "2.1", "rows": 4, "columns": 5, "chunk": None, "last": True}),
        ("1x1x4", {"config": "2.2", "rows": 6, "columns": 6, "chunk": 2}),
        ("1x1x4", {"config": "2.1", "rows": 2, "columns": 3}),  # too small to cut
    ],
)
def test_a_picture_in_strips(ranks, mesh, options):
    """Every value, edges between strips included: a missing or doubled halo is an error of a tenth, not of 1e-5. The
    first rank encodes the whole picture, so there the bits are those of one GPU."""
    for decoded, encoded in ranks.ask("vae", mesh=mesh, **options):
        assert decoded < ROUNDING and encoded == 0.0


@pytest.mark.parametrize("mesh", ["1x2x1", "1x3x1", "1x3bx1", "1x2x2"])
@pytest.mark.parametrize(
    "options",
    [
        {"grid": (3, 5, 7), "block": 4},  # 27 blocks, the last of one token
        {"grid": (5, 6, 7), "block": 4, "keep": 0.06},  # many rows read nothing of some rank
        {"grid": (5, 6, 7), "block": 8, "heads": 4, "fp8": True},
        {"grid": (5, 6, 7), "block": 8, "slope": False},
    ],
    ids=["quarter", "few", "fp8", "means"],
)
def test_sparse_attention_over_a_ring_is_that_of_one_rank(ranks, mesh, options):
    answers = ranks.ask("sparse_attention", mesh=mesh, **options)
    assert max(error for error, _ in answers) < ROUNDING
    assert "keep" not in options or all(unread > 0 for _, unread in answers)


@pytest.mark.parametrize(
    ("mesh", "request_"),
    [
        ("1x3x1", {"steps": 10, "sparse": SPARSE, "magcache": MAGCACHE}),
        ("1x2x2", {"steps": 4, "sparse": SPARSE, **TALL}),
    ],
    ids=["magcache", "another size"],
)
def test_sparse_trajectories_over_a_ring(ranks, alone, mesh, request_):
    """Two blocks may be worth the same but for rounding, and then one rank reads the one and three ranks the other, on
    whatever mesh: such a seed is told by a small difference, and another one is taken."""
    for seed in (5, 4, 6):
        request = {**request_, "seed": seed}
        answers, wanted = together(ranks, mesh=mesh, request=request), alone(request=request)
        error = parallel_checks.relative(answers[0][0], wanted[0])
        assert error < 2e-2
        if error < ROUNDING:
            break
    equal_on_all(answers, wanted)
    assert parallel_checks.relative(alone(request={**request, "sparse": None})[0], wanted[0]) > 5e-2


@pytest.mark.parametrize("mesh", ["1x2x1", "1x2x2"])
@pytest.mark.parametrize("attention", ["sdpa", "math-fp8"])
def test_a_sparse_forward_with_frames_of_their_own_timesteps(ranks, mesh, attention):
    """Shards end at blocks and at pieces of a frame; behind FP8 attention all that is exchanged is rounded to 3 bits,
    which on a CPU one rank's sparse attention is not: 7.5e-3 is measured on either mesh."""
    options = {"mesh": mesh, "attention": attention, "grid": (5, 12, 14), "apart": True}
    for whole, sharded in ranks.ask("sparse_forward", **options):
        assert whole < ROUNDING and sharded < (ROUNDING if attention == "sdpa" else 8e-3)


@pytest.mark.parametrize("attention", ["math", "math-fp8"])
@pytest.mark.parametrize("mesh", ["1x1x4", "1x4x1", "1x2x2"])
def test_what_a_sparse_forward_exchanges_and_chooses(ranks, mesh, attention):
    """A sparse exchange carries as many bytes as a dense one: no block is filled up before an exchange. Each rank
    chooses once a layer, for its own heads or rows: none is chosen for twice. A ring also exchanges the means of its
    blocks, and each row's share."""
    grid, layers, heads = (5, 7, 8), 2, 4
    answers = ranks.ask("sparse_counts", mesh=mesh, attention=attention, tokens=grid)
    size, split = answers[0]["block"], Mesh.parse(mesh)
    blocks, mine = -(-math.prod(grid) // size), heads // split.ulysses
    means, share = 4 * mine * -(-blocks // split.ring) * 16, mine * blocks  # and variances, of keys and values
    assert sum(answer["sparse"][2] for answer in answers) == layers * heads * blocks
    for answer in answers:
        assert answer["dense"][1:] == (0, 0) and answer["sparse"][1] == layers
        assert answer["sparse"][0] - answer["dense"][0] == layers * 4 * (split.ring - 1) * (means + share)
