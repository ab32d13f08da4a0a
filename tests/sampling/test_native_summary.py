"""What WanCore Accelerate says after a run, in a user's words."""

from __future__ import annotations

from typing import Any

import pytest

from wan_core.config import SparseOptions
from wan_core.sampling.native.run import NativeRun
from wan_core.sampling.native.summary import advice_for, report_text
from wan_core.sampling.schedules import SchedulePart

SPARSE = SparseOptions(sparsity=0.8125)
CALLS = {"sdpa": 20}


def run_of(
    steps: int = 20,
    sparsities: tuple[float, ...] = (),
    taken: dict[str, int] = CALLS,
    left_calls: dict[str, int] = {},  # noqa: B006
    **changed: Any,
) -> NativeRun:
    run = NativeRun(SchedulePart(0, steps, steps), sparsities, sparse=SPARSE if sparsities else None)
    run.began, run.seconds = 1.0, 284.0
    for counter, calls in ((run.take, taken), (run.leave, left_calls)):
        for name, count in calls.items():
            for _ in range(count):
                counter(name)
    for name, value in changed.items():
        setattr(run, name, value)
    return run


def lines(run: NativeRun, advice: str | None = None) -> list[str]:
    return report_text(run, 0.72, advice).splitlines()


def test_the_users_words_stand_first_and_the_counts_last() -> None:
    assert lines(run_of(left_calls={"cross-attention calls": 3}), advice="a better card") == [
        "14.2 s a step; attention by sdpa",
        "next: a better card",
        "WanCore Accelerate: self-attention calls: 20 by sdpa; left to ComfyUI: 3 cross-attention calls",
    ]


def test_what_was_saved_and_what_it_is_worth() -> None:
    """Half of the forwards and 81 % of the keys: 0.5 * (0.28 + 0.72 * (1.16 * 0.19 + 0.08)) of the time."""
    sparsities = (0.8125,) * 20
    half = run_of(sparsities=sparsities, sparse_steps=list(range(10)), skipped=(20, 40))
    assert lines(half)[0] == (
        "20 of 40 forwards skipped, attention reads 19 % of the keys: about 4.0 times as fast, estimated"
    )
    assert lines(run_of(skipped=(10, 20)))[0] == "10 of 20 forwards skipped: about 2.0 times as fast, estimated"
    sparse_run = run_of(sparsities=sparsities, sparse_steps=list(range(15)))
    assert lines(sparse_run)[0].startswith("attention reads 19 % of the keys in 15 of 20 steps: about 1.6 times")
    assert lines(run_of(skipped=(0, 20)))[0] == "14.2 s a step; attention by sdpa"


@pytest.mark.parametrize(
    ("left_calls", "first"),
    [
        ({}, "warning: self-attention stayed with ComfyUI: no call came to WanCore"),
        ({"calls with a mask": 2}, "warning: self-attention stayed with ComfyUI: 2 calls with a mask"),
        ({"self-attention, as chosen": 2}, "14.2 s a step; attention by ComfyUI"),
    ],
)
def test_a_run_that_was_not_accelerated_says_why(left_calls: dict[str, int], first: str) -> None:
    assert lines(run_of(taken={}, left_calls={**left_calls, "cross-attention calls": 9}))[0] == first


def test_a_compared_step_says_what_a_step_took_before() -> None:
    """19 steps in 190 s, and one of ComfyUI's own in 16 s; nothing where that one was not computed."""
    compared = "self-attention, of the step that is compared"
    timed = {"compare": True, "seconds": 206.0, "passed": {18: 300.0, 19: 316.0}, "skipped": (8, 40)}
    first, second, counts = lines(run_of(left_calls={compared: 40}, **timed))
    assert first == "8 of 40 forwards skipped"
    assert second == "200.0 s instead of 320.0 s for 20 steps, by one without WanCore; attention by sdpa"
    assert counts.endswith(f"40 {compared}")
    assert lines(run_of(**timed))[1].endswith("the last step was not computed, so there is nothing to compare")
    timed["skipped"] = (0, 40)
    exact, rounded = (
        lines(run_of(left_calls={compared: 40}, taken={name: 20}, **timed))[0] for name in ("sdpa", "int8")
    )
    assert "; nothing changed but rounding; attention by sdpa" in exact and "nothing changed" not in rounded
    assert "compare 'on' shows in the next run what was gained" in lines(run_of(offers=True))


HOPPER, ADA = (9, 0), (8, 9)


@pytest.mark.parametrize(
    ("steps", "kernels", "card", "bytes_each", "message"),
    [
        (20, ["flash4"], HOPPER, 2.0, "pip install --pre flash-attn-4"),
        (20, [], HOPPER, 2.0, "a four-step LoRA (lightx2v) needs 4 steps in place of 20"),
        (4, [], ADA, 2.0, "the FP8 file of this model"),
        (4, [], ADA, 1.0, None),
        (4, [], (8, 6), 2.0, None),
        (4, [], None, 2.0, None),
    ],
)
def test_what_would_help_next(
    steps: int, kernels: list[str], card: tuple[int, int] | None, bytes_each: float, message: str | None
) -> None:
    advice = advice_for(run_of(steps), kernels, card, bytes_each)
    assert advice == message if message is None else str(advice).startswith(message)
