"""Attention of ComfyUI's own Wan models, without ComfyUI: what is taken and what is left, sparse calls, and steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wan_core.config import SparseOptions
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sdpa import SDPA, math_reference
from wan_core.ops.attention.sparse.forward import SparseForward
from wan_core.ops.attention.sparse.kernels import KERNELS, block_length
from wan_core.ops.attention.sparse.routing import Rule
from wan_core.ops.attention.tiles import make_tiles
from wan_core.ops.cards import NO_CARD
from wan_core.sampling.native.attention import COMFYUI, NativeAttention
from wan_core.sampling.native.run import FORWARD, NativeForward, NativeRun
from wan_core.sampling.plan import make_plan
from wan_core.sampling.schedules import SchedulePart, find_part
from wan_core.sampling.sparsity.schedule import sparsify, step_sparsities

GRID, HEADS, DIM = (3, 5, 7), 2, 16
TOKENS = 3 * 5 * 7
HALF = SparseOptions(sparsity=0.5, ramp=0)


def run_of(sparsity: float = 0.0, sparse: SparseOptions | None = HALF) -> NativeRun:
    """A run of one step; sparsity 0: no step is sparse."""
    return NativeRun(SchedulePart(0, 1, 1), (sparsity,) if sparsity else (), sparse=sparse if sparsity else None)


def forward(sparsity: float = 0.0, **changed: Any) -> NativeForward:
    return NativeForward(run_of(sparsity), GRID, **changed)


def qkv(length: int = TOKENS, keys: int | None = None, batch: int = 1, seed: int = 0) -> list[torch.Tensor]:
    """[B, L, H * D]."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, n, HEADS * DIM, generator=draw) for n in (length, keys or length, keys or length)]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, DIM))


def original(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **_: Any) -> torch.Tensor:
    """In the place of ComfyUI's function: no attention could give this."""
    return torch.full_like(q, 7.0)


def options(of: NativeForward, layer: int = 0, **changed: Any) -> dict[str, Any]:
    return {"transformer_options": {FORWARD: of, "block_index": layer, **changed}, "heads": HEADS}


# ------------------------------------------------------------------------------------------------- taken and left


def test_self_attention_is_taken_in_every_layout() -> None:
    of, attend, tensors = forward(), NativeAttention("auto"), qkv(batch=2)
    expected = math_reference(*map(heads, tensors))
    flat = attend(original, *tensors, **options(of))
    apart = [heads(x).transpose(1, 2) for x in tensors]
    tall = attend(original, *apart, skip_reshape=True, skip_output_reshape=True, **options(of))
    torch.testing.assert_close(heads(flat), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tall.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)
    assert of.run.taken == {"sdpa": 2} and not of.run.left


def test_the_last_step_of_a_run_that_compares_is_comfyuis() -> None:
    run, waited = NativeRun(SchedulePart(0, 3, 3), (0.5,) * 3, compare=True, sparse=HALF), []
    attend, tensors = NativeAttention("auto"), qkv()
    for step in range(3):
        output = attend(original, *tensors, **options(NativeForward(run, GRID)))
        assert bool((output == 7).all()) is (step == 2)
        run.pass_step(step, lambda step=step: waited.append(step))
    assert waited == [1, 2] and run.before == run.passed[2] - run.passed[1] > 0
    assert run.left == {"self-attention, of the step that is compared": 1} and sum(run.taken.values()) == 2


LEFT = {
    "cross-attention calls": (qkv(TOKENS, 12), {}),
    "calls with a mask": (qkv(), {"mask": torch.ones(TOKENS, TOKENS)}),
    "calls that ask for a precision": (qkv(), {"low_precision_attention": False}),
    "calls with scale": (qkv(), {"scale": 0.5}),
    "calls with new_thing": (qkv(), {"new_thing": torch.ones(2)}),
    "calls of training": ([x.requires_grad_() for x in qkv()], {}),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_goes_to_the_override_before_or_to_comfyui(why: str) -> None:
    tensors, keywords = LEFT[why]
    of = forward()
    assert (NativeAttention("auto")(original, *tensors, **keywords, **options(of)) == 7).all()
    assert of.run.left == {why: 1} and not of.run.taken

    def earlier(func: Any, q: torch.Tensor, *_: Any, **arguments: Any) -> torch.Tensor:
        assert func is original and arguments.keys() == keywords.keys() | {"heads", "transformer_options"}
        return torch.full_like(q, 3.0)

    assert (NativeAttention("auto", earlier=earlier)(original, *tensors, **keywords, **options(of)) == 3).all()


@pytest.fixture
def prefers_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card for which torch has a faster kernel with a text than the one that ComfyUI has it take."""
    card = replace(NO_CARD, attention=("sdpa", "cudnn"))
    monkeypatch.setattr("wan_core.sampling.native.attention.card_of", lambda _: card)


@pytest.mark.parametrize("attention", ["auto", "math-fp8", "sdpa"])
@pytest.mark.parametrize("sparse", [None, HALF])
def test_a_text_is_taken_where_a_kernel_is_faster(
    prefers_cudnn: None, attention: str, sparse: SparseOptions | None
) -> None:
    """Whatever computes self-attention; not other keys that are few, and with what takes no other call neither."""
    of = NativeForward(run_of(0.5, sparse), GRID, text=12)
    attend, tensors = NativeAttention(attention), qkv(TOKENS, 12)
    output = attend(original, *tensors, **options(of))
    torch.testing.assert_close(heads(output), math_reference(*map(heads, tensors)), atol=1e-5, rtol=1e-5)
    assert of.run.words() == "self-attention calls: none; cross-attention calls: 1 by sdpa" and not of.run.taken
    assert (attend(original, *qkv(TOKENS, 9), **options(of)) == 7).all()  # not the text: an image's or a voice's
    assert (attend(original, *tensors, mask=torch.ones(TOKENS, 12), **options(of)) == 7).all()
    assert of.run.left == {"cross-attention calls": 2}
    chosen = NativeAttention(attention, chosen=lambda func, q, *_, **named: q * 2)
    assert not torch.equal(chosen(original, *tensors, **options(of)), tensors[0] * 2)


def test_a_text_is_left_where_comfyuis_kernel_was_chosen(prefers_cudnn: None) -> None:
    of = NativeForward(run_of(), GRID, text=12)
    assert (NativeAttention(COMFYUI)(original, *qkv(TOKENS, 12), **options(of)) == 7).all()
    assert of.run.left == {"cross-attention calls": 1}


def test_the_step_that_is_compared_leaves_the_text_too(prefers_cudnn: None) -> None:
    run = NativeRun(SchedulePart(0, 2, 2), compare=True)
    run.pass_step(0, lambda: None)
    assert (
        NativeAttention("auto")(original, *qkv(TOKENS, 12), **options(NativeForward(run, GRID, text=12))) == 7
    ).all()
    assert run.left == {"cross-attention calls": 1} and run.plain


def test_an_override_that_was_set_before_keeps_its_result() -> None:
    """It gets every call first, ours in the place of ComfyUI's function, with arguments by position too."""
    tensors = qkv()
    q, k, v = map(heads, tensors)

    def warmer(func: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **named: Any) -> Any:
        return func(q * 1.5, k, v, heads, None, **named)

    of = forward()
    output = NativeAttention("auto", earlier=warmer)(original, *tensors, **options(of))
    torch.testing.assert_close(heads(output), math_reference(q * 1.5, k, v), atol=1e-5, rtol=1e-5)
    assert of.run.taken == {"sdpa": 1} and not of.run.left

    of = forward()
    own = NativeAttention("auto", earlier=lambda func, q, *_, **named: q * 2)
    assert torch.equal(own(original, *tensors, **options(of)), tensors[0] * 2)
    [(by, count)] = of.run.taken.items()
    assert count == 1 and by.startswith("an attention override (") and by.endswith("which was set before")


def test_what_chose_comfyuis_kernel_gets_what_is_left() -> None:
    of, attend = forward(), NativeAttention("auto", chosen=lambda func, q, *_, **named: q * 2)
    attend(original, *qkv(), **options(of))
    tensors = qkv(TOKENS, 12)
    assert of.run.taken == {"sdpa": 1}
    assert torch.equal(attend(original, *tensors, **options(of)), tensors[0] * 2)
    assert of.run.left == {"cross-attention calls": 1}


class Box:
    """Stand-in for ComfyUI's AttentionTensorContainer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def peek(self) -> torch.Tensor:
        assert self.tensor is not None
        return self.tensor

    def take(self) -> torch.Tensor:
        tensor, self.tensor = self.peek(), None
        return tensor


@pytest.mark.parametrize("sparse", [None, HALF])
@pytest.mark.parametrize("chosen", [False, True])
def test_containers_are_emptied_where_the_call_is_taken(sparse: SparseOptions | None, chosen: bool) -> None:
    seen: list[Any] = []

    def comfyui(*args: Any, **named: Any) -> torch.Tensor:
        seen.extend(args)
        return torch.full((1,), 7.0)

    other = (lambda func, *args, **named: comfyui(*args)) if chosen else None
    attend, plain = (NativeAttention("auto", original=comfyui, chosen=c) for c in (other, None))
    of = NativeForward(run_of(0.5, sparse), GRID)
    boxes = [Box(x) for x in qkv()]
    output = attend.container_function(*boxes, **options(of))
    assert torch.equal(output, plain(original, *qkv(), **options(NativeForward(run_of(0.5, sparse), GRID))))
    assert not seen and all(box.tensor is None for box in boxes)
    cross = [Box(x) for x in qkv(TOKENS, 12)]
    assert attend.container_function(*cross, **options(of)) == 7
    assert of.run.left == {"cross-attention calls": 1}
    assert [isinstance(x, Box) for x in seen] == [not chosen] * 3
    boxes = [Box(x) for x in qkv()]
    assert attend.container_function(*boxes, heads=HEADS) == 7  # outside of a run


def test_what_a_backend_cannot_compute_is_left_with_its_reason() -> None:
    of = forward()
    assert (NativeAttention("flash4")(original, *qkv(), **options(of)) == 7).all()
    assert of.run.left == {"self-attention (flash4 needs an NVIDIA GPU)": 1}
    NativeAttention(COMFYUI)(original, *qkv(), **options(of))
    assert list(of.run.left)[1:] == ["self-attention, as chosen"]
    assert "left to ComfyUI: 1 self-attention (flash4" in of.run.words()


def test_fp8_is_quantised_as_in_our_engine_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where few queries ask many keys, nor in a short video: there the exact kernel is faster, and computes."""
    monkeypatch.setattr("wan_core.sampling.native.attention.PAYS", 100)
    run, attend = NativeRun(SchedulePart(0, 1, 1)), NativeAttention("math-fp8")
    large, small = (NativeForward(run, grid) for grid in ((8, 8, 16), (2, 8, 16)))
    in_fp8, exact = BACKENDS["math-fp8"].load(), BACKENDS["sdpa"].load()
    for of, tensors, backend in (
        (large, qkv(1024), in_fp8),
        (large, qkv(128, 1024 + 128), exact),
        (small, qkv(256), exact),
        (large, qkv(1024), in_fp8),
    ):
        output = attend(original, *tensors, **options(of))
        assert torch.equal(heads(output), backend(*map(heads, tensors)))
    assert run.words().startswith("self-attention calls: 2 by math-fp8, 2 by sdpa")


def test_a_frame_of_queries_over_all_keys_is_self_attention() -> None:
    """Animate-2 attends so, to the pose's frame as well."""
    of, frame = forward(), GRID[1] * GRID[2]
    tensors = qkv(frame, TOKENS + frame)
    output = NativeAttention("auto")(original, *tensors, **options(of))
    torch.testing.assert_close(heads(output), math_reference(*map(heads, tensors)), atol=1e-5, rtol=1e-5)
    assert of.run.taken == {"sdpa": 1}


# --------------------------------------------------------------------------------------------------------- sparse


@settings(deadline=None, max_examples=15)
@given(
    st.tuples(st.integers(1, 4), st.integers(2, 8), st.integers(2, 8)),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_reading_nearly_all_blocks_is_dense_attention(grid: Any, front: int, behind: int) -> None:
    """Wherever other tokens are: nothing is lost, doubled or put elsewhere."""
    video = grid[0] * grid[1] * grid[2]
    tensors = qkv(video + front + behind)
    run = run_of(1e-6)
    of = NativeForward(run, grid, front=front)
    output = NativeAttention("auto")(original, *tensors, **options(of))
    torch.testing.assert_close(heads(output), math_reference(*map(heads, tensors)), atol=1e-5, rtol=1e-4)
    assert run.taken == {"sparse attention (math)": 1}


def by_frames(
    of: NativeForward, tensors: list[torch.Tensor], poses: list[torch.Tensor], slope: bool = True
) -> torch.Tensor:
    """Attention of Animate-2: every frame to all tokens, and but the first to a frame of the pose's keys and values."""
    attend, (q, k, v), frame = NativeAttention("auto"), tensors, of.frame
    of.run.sparse = of.run.sparse and replace(HALF, slope=slope)
    outputs = []
    for index in range(of.grid[0]):
        frame_before = slice((index - 1) * frame, index * frame)
        keys, values = (
            torch.cat([x, pose[:, frame_before]], 1) if index else x for x, pose in zip((k, v), poses, strict=True)
        )
        outputs.append(attend(original, q[:, index * frame : (index + 1) * frame], keys, values, **options(of)))
    return torch.cat(outputs, 1)


def test_frames_read_their_own_blocks_and_the_pose() -> None:
    """At a small share: the pose's values reach every query, and the result is near the dense one."""
    of = forward(0.75, by_frames=True)
    tensors, poses = qkv(), qkv(seed=5)[:2]
    output = by_frames(of, tensors, poses)
    dense = by_frames(forward(by_frames=True), tensors, poses)
    assert 0.01 < (output - dense).norm() / dense.norm() < 0.5
    poses[1][:] += 100
    changed = (by_frames(of, tensors, poses) - output).abs().amax((0, 2))
    assert (changed[of.frame :] > 1).all() and (changed[: of.frame] == 0).all()


def test_frames_with_the_slope_are_nearer_to_dense_ones() -> None:
    """Each of them, those that read a frame of the pose as well."""
    tensors, poses = qkv(batch=2), qkv(seed=5, batch=2)[:2]
    dense, plain, sloped = (
        by_frames(forward(sparsity, by_frames=True), tensors, poses, slope=slope).unflatten(1, (GRID[0], -1))
        for sparsity, slope in ((0.0, False), (0.75, False), (0.75, True))
    )
    lost, less = ((x - dense).square().mean((0, 2, 3)).sqrt() for x in (plain, sloped))
    assert (less < 0.85 * lost).all(), (lost, less)


def test_sparse_calls_are_those_of_our_engine() -> None:
    """Bit for bit, for a video without other tokens."""
    of, tensors = forward(0.5), qkv(batch=2)
    output = NativeAttention("auto")(original, *tensors, **options(of, layer=1))
    kernel = KERNELS["math"]
    tiles = make_tiles(GRID, block_length(kernel, TOKENS), torch.device("cpu"))
    state = SparseForward(kernel, (SDPA,), tiles, Rule(0.5))
    ordered = [heads(x)[:, tiles.order] for x in tensors]
    assert torch.equal(heads(output), state.attend(AttentionCall(0), *ordered)[:, tiles.inverse])
    dense = math_reference(*map(heads, tensors))
    assert (heads(output) - dense).norm() > 0.01 * dense.norm()


def test_other_tokens_are_read_by_all_and_read_everything() -> None:
    """Whatever the share: their values reach every query, and their own queries are dense."""
    front, behind = 4, 6
    of, tensors = forward(0.9, front=front), qkv(TOKENS + front + behind)
    output = heads(NativeAttention("auto")(original, *tensors, **options(of)))
    dense = math_reference(*map(heads, tensors))
    others = [*range(front), *range(front + TOKENS, TOKENS + front + behind)]
    torch.testing.assert_close(output[:, others], dense[:, others], atol=1e-5, rtol=1e-5)
    for token in others:
        tensors[2][:, token] += 100
        changed = heads(NativeAttention("auto")(original, *tensors, **options(of)))
        assert ((changed - output).abs().amax((0, 2, 3)) > 1e-4).all()
        tensors[2][:, token] -= 100


def test_sequences_whose_order_is_not_known_are_dense() -> None:
    frame = GRID[1] * GRID[2]
    for length, extra, expected in (
        (TOKENS + 5, False, "sdpa"),
        (TOKENS - 1, True, "sdpa"),
        (TOKENS - frame, True, ""),
    ):
        of = forward(0.5, extra=extra)
        NativeAttention("auto")(original, *qkv(length), **options(of))
        assert list(of.run.taken) == [expected or "sparse attention (math)"]


# ---------------------------------------------------------------------------------------------------------- steps


def simple(steps: int, shift: float) -> list[float]:
    """ComfyUI's schedule of this name."""
    table = [shift * t / (1 + (shift - 1) * t) for t in ((i + 1) / 1000 for i in range(1000))]
    return [table[-(1 + int(i * 1000 / steps))] for i in range(steps)] + [0.0]


@settings(deadline=None, max_examples=66)
@given(st.integers(1, 60), st.floats(1, 12), st.data())
def test_a_part_of_a_schedule_finds_its_place(steps: int, shift: float, data: Any) -> None:
    begin = data.draw(st.integers(0, steps - 1))
    end = data.draw(st.integers(begin + 1, steps))
    part = find_part(simple(steps, shift)[begin : end + 1], shift)
    if (begin == 0 and end == steps) or (steps <= 40 and end - begin > 2):
        assert part == SchedulePart(begin, end - begin, steps)
    assert part.steps == end - begin and abs(part.first - begin) <= 0.1 * part.total


@pytest.mark.parametrize("sparse", [HALF, SparseOptions(sparsity=0.8125)])
@pytest.mark.parametrize("steps", [4, 20, 40])
def test_two_samplers_have_the_sparsity_of_one_plan(sparse: SparseOptions, steps: int) -> None:
    plan = sparsify(make_plan(task="t2v-A14B", steps=steps), sparse)
    sigmas, sparsities = simple(steps, 8.0), []
    for begin, end in ((0, steps // 2), (steps // 2, steps)):
        part = find_part(sigmas[begin : end + 1], 8.0)
        run = NativeRun(part, step_sparsities(sparse, part.total))
        for run.step in range(end - begin):
            sparsities.append(run.sparsity)
    assert sparsities == [step.sparsity for step in plan.steps]
