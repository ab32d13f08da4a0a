"""Models that load at once, and the first step that is set up meanwhile. Devices are named here, not used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from wan_core.checkpoint import staged
from wan_core.checkpoint.staged import Reading, current_reading, default_threads, reading
from wan_core.config import LoadOptions
from wan_core.ops.attention.registry import AttentionError
from wan_core.pipeline.loading import LoadingEnded, load_parts
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.rehearsal import Rehearsal

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def rehearsing(run: Callable[[Callable[[], bool]], None]) -> Rehearsal:
    return SimpleNamespace(worthwhile=True, begin=lambda: None, beside=True, run=lambda wanted: run(wanted))  # type: ignore


def test_the_first_step_is_prepared_while_files_are_read() -> None:
    preparing, reads = threading.Event(), threading.Event()

    def load(name: str) -> torch.nn.Module:
        reads.set()
        assert preparing.wait(10), "nothing was prepared while this was read"
        return torch.nn.Identity()

    def run(wanted: Callable[[], bool]) -> None:
        assert reads.wait(10) and wanted(), "nothing was read while this was prepared"
        preparing.set()

    models = load_parts(["high", "low"], load, GPU, in_order=False, rehearsal=rehearsing(run))
    assert list(models) == ["high", "low"]


@pytest.mark.parametrize("in_order", [False, True])
def test_what_was_compiled_before_is_found_before_anything_is_read_and_not_prepared(in_order: bool) -> None:
    done: list[str] = []

    def load(name: str) -> torch.nn.Module:
        done.append(name)
        return torch.nn.Identity()

    found = SimpleNamespace(
        worthwhile=True, begin=lambda: done.append("begin"), beside=False, run=lambda *_: done.append("run")
    )
    load_parts(["high", "low"], load, GPU, in_order=in_order, rehearsal=found)  # type: ignore
    assert done[0] == "begin" and sorted(done[1:]) == ["high", "low"]


def test_an_interrupted_preparation_ends_the_reading() -> None:
    ended: list[type] = []

    def load(name: str) -> torch.nn.Module:
        on_bytes = current_reading().on_bytes
        assert on_bytes is not None
        try:
            for _ in range(1000):
                time.sleep(0.01)
                on_bytes(1)
        except Exception as fault:
            ended.append(type(fault))
            raise
        raise AssertionError("read to the end")

    def run(wanted: Callable[[], bool]) -> None:
        raise KeyboardInterrupt

    begin = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        load_parts(["high", "low"], load, GPU, in_order=False, rehearsal=rehearsing(run))
    assert ended == [LoadingEnded] * 2 and time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        (["high"], Reading(), 8),
        (["high", "low"], Reading(), 4),
        (["high", "low", "vae"], Reading(), 4),
        (["a", "b"], Reading(threads=2), 1),
        (["a"], Reading(threads=3), 3),
    ],
)
def test_several_files_share_the_threads(
    names: list[str], given: Reading, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    seen: list[tuple[int | None, bool]] = []

    def load(name: str) -> torch.nn.Module:
        seen.append((current_reading().threads, current_reading().mapped))
        return torch.nn.Identity()

    with reading(given):
        load_parts(names, load, GPU, in_order=False)
    assert seen == [(expected, False)] * len(names)


@pytest.mark.parametrize(("name", "words"), [("flash9", "is not known"), ("flash4", "needs an NVIDIA GPU")])
def test_a_backend_that_cannot_run_is_refused_before_anything_is_read(name: str, words: str) -> None:
    read: list[int] = []
    with reading(Reading(on_bytes=read.append)), pytest.raises(AttentionError, match=words):
        Pipeline.load(LoadOptions(model="tiny", device="cpu", attention=name))
    assert read == []


@pytest.mark.parametrize(
    ("cores", "processes", "expected"),
    [(1, 1, 4), (16, 1, 8), (32, 1, 16), (64, 1, 16), (32, 2, 8), (64, 4, 8), (8, 8, 4)],
)
def test_threads_by_cores(cores: int, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert default_threads(processes) == expected
