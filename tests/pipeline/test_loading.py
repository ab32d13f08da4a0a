"""Models that load at once. Devices are named here, not used."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from wan_core.checkpoint import staged
from wan_core.checkpoint.staged import Reading
from wan_core.pipeline.reading import LoadingEnded, load_parts

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def test_files_are_read_at_once() -> None:
    both = threading.Barrier(2)

    def load(name: str, how: Reading) -> torch.nn.Module:
        both.wait(10)
        return torch.nn.Identity()

    assert list(load_parts(["high", "low"], load, GPU, in_order=False)) == ["high", "low"]


def test_ranks_read_at_once_and_exchange_one_model_after_another() -> None:
    """The second model is open before the first one exchanges anything, and the text encoder waits for none."""
    names, exchanged = ["high", "low", "text_encoder", "vae"], []
    all_open = threading.Barrier(len(names))

    def load(name: str, how: Reading) -> torch.nn.Module:
        all_open.wait(10)
        for _ in range(3):
            if name == "high":
                time.sleep(0.02)
            how.turn()
            exchanged.append(name)
        return torch.nn.Identity()

    for device in (GPU, torch.device("cpu")):
        exchanged.clear()
        assert list(load_parts(names, load, device, in_order=True)) == names
        assert [name for name in exchanged if name != "text_encoder"] == ["high"] * 3 + ["low"] * 3 + ["vae"] * 3
        assert exchanged[:3] == ["text_encoder"] * 3


def test_a_failure_ends_those_that_wait_for_their_turn() -> None:
    ended: list[type] = []

    def load(name: str, how: Reading) -> torch.nn.Module:
        if name == "high":
            raise ValueError("damaged")
        try:
            how.turn()
        except Exception as stop:
            ended.append(type(stop))
            raise
        raise AssertionError("its turn has come")

    with pytest.raises(ValueError, match="damaged"):
        load_parts(["high", "low", "vae"], load, GPU, in_order=True)
    assert ended == [LoadingEnded] * 2


@pytest.mark.parametrize("fault", [ValueError("damaged"), KeyboardInterrupt()], ids=repr)
def test_a_failure_ends_the_other_reading(fault: BaseException) -> None:
    ended: list[type] = []

    def load(name: str, how: Reading) -> torch.nn.Module:
        if name == "high":
            time.sleep(0.05)
            raise fault
        on_bytes = how.on_bytes
        assert on_bytes is not None
        try:
            for _ in range(1000):
                time.sleep(0.01)
                on_bytes(1)
        except Exception as stop:
            ended.append(type(stop))
            raise
        raise AssertionError("read to the end")

    begin = time.perf_counter()
    with pytest.raises(type(fault)):
        load_parts(["high", "low"], load, GPU, in_order=False)
    assert ended == [LoadingEnded] and time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("names", "reading", "expected"),
    [
        (["high"], Reading(), 8),
        (["high", "low"], Reading(), 4),
        (["high", "low", "vae"], Reading(), 4),
        (["a", "b"], Reading(threads=2), 1),
        (["a"], Reading(threads=3), 3),
    ],
)
def test_several_files_share_the_threads(
    names: list[str], reading: Reading, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    seen: list[tuple[int | None, bool]] = []

    def load(name: str, how: Reading) -> torch.nn.Module:
        seen.append((how.threads, how.mapped))
        return torch.nn.Identity()

    load_parts(names, load, GPU, in_order=False, how=reading)
    assert seen == [(expected, False)] * len(names)
