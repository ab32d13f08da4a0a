"""A run that is interrupted while blocks compile ends at once, and the next one finds what was compiled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import eager

from tests.execution.test_compile import CPU, SIZES, SMALL, forward
from wan_core.checkpoint.random import random_module
from wan_core.execution.interruptible import Interruptible
from wan_core.execution.optimize import compilations, compile_blocks

SLOW = 3.0  # seconds of a compiler in these tests


class Stop(Exception):
    pass


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    if Interruptible.running is not None:
        Interruptible.running.join()
    torch.compiler.reset()


def after(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds

    def poll() -> None:
        if time.monotonic() > end:
            raise Stop

    return poll


@torch.no_grad()
def test_compiling_is_interrupted_and_goes_on_for_the_next_run() -> None:
    """torch's own compiler, with a backend that takes its time."""
    compiled: list[float] = []

    def slow(graph: Any, inputs: Any) -> Any:
        time.sleep(SLOW)
        compiled.append(time.monotonic())
        return eager(graph, inputs)

    model = random_module(SMALL, device=CPU, dtype=torch.float32)
    expected = forward(model, SIZES[0])
    compile_blocks(model, CPU, backend=slow, poll=after(0.3))
    begin = time.monotonic()
    with pytest.raises(Stop):
        forward(model, SIZES[0])
    assert time.monotonic() - begin < SLOW / 2 and not compiled
    before = compilations()
    compile_blocks(model, CPU, backend=slow, poll=lambda: None)
    for size in SIZES:
        assert torch.isfinite(forward(model, size)).all()
    torch.testing.assert_close(forward(model, SIZES[0]), expected, rtol=1e-4, atol=1e-4)
    assert len(compiled) == 2, "the part before attention, by the run that was interrupted, and the one after it"
    assert compilations() - before <= 2 and Interruptible.running is None


def part_of(threads: list[threading.Thread]) -> Callable[..., torch.Tensor]:
    def part(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread())
        assert torch.is_inference_mode_enabled() == x.is_inference()
        if x.numel() == 0:
            raise ZeroDivisionError
        return x + 1

    return part


@pytest.mark.parametrize("inference", [False, True])
def test_only_calls_that_may_compile_run_in_another_thread(inference: bool) -> None:
    """They run in the mode of the caller, and raise what the part does."""
    threads: list[threading.Thread] = []
    part, block = Interruptible(part_of(threads), lambda: None), nn.Linear(2, 2)
    with torch.inference_mode(inference):
        for shape, dtype in (((2, 32), torch.float32), ((7, 64), torch.float32), ((7, 64), torch.bfloat16)):
            for _ in range(2):
                x = torch.zeros(shape, dtype=dtype)
                assert torch.equal(part(block, x), x + 1)
        with pytest.raises(ZeroDivisionError):
            part(block, torch.zeros(0, 3))
    here = threading.current_thread()
    assert [one is here for one in threads] == [False, True, True, True, False, True, False]
