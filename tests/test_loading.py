"""Models that load at once, and what is set up meanwhile; devices are only named here, so that a CPU shows it."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from wan_core.attention.registry import AttentionError
from wan_core.checkpoint.staged import SHARED_THREADS, THREADS, Reading, current_reading, reading
from wan_core.config import LoadOptions
from wan_core.loading import LoadingEnded, Prepared, load_parts
from wan_core.pipeline import Pipeline

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def prepared(ran: list[str], worthwhile: bool = True) -> Prepared:
    rehearsal = SimpleNamespace(worthwhile=worthwhile, run=lambda wanted=None: ran.append("rehearsed"))
    return Prepared("sdpa", rehearsal)  # type: ignore


def test_libraries_are_imported_while_files_are_read() -> None:
    ran: list[str] = []
    importing, reads = threading.Event(), threading.Event()

    def load(name: str) -> torch.nn.Module:
        reads.set()
        assert importing.wait(10), "nothing was imported while this was read"
        ran.append(name)
        return torch.nn.Identity()

    def prepare() -> Prepared:
        assert reads.wait(10), "nothing was read while this was imported"
        importing.set()
        return prepared(ran)

    models, found = load_parts(["high", "low"], load, GPU, in_order=False, prepare=prepare)
    assert sorted(models) == ["high", "low"] and found.attention == "sdpa"
    assert sorted(ran) == ["high", "low", "rehearsed"]


def test_a_library_that_does_not_work_ends_the_reading() -> None:
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

    def prepare() -> Prepared:
        raise AttentionError("it cannot be imported")

    begin = time.perf_counter()
    with pytest.raises(AttentionError, match="cannot be imported"):
        load_parts(["high", "low"], load, GPU, in_order=False, prepare=prepare)
    assert ended == [LoadingEnded] * 2 and time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [(["high"], Reading(), THREADS), (["high", "low"], Reading(), SHARED_THREADS), (["a", "b"], Reading(threads=2), 2)],
)
def test_several_files_share_the_threads(names: list[str], given: Reading, expected: int) -> None:
    seen: list[tuple[int, bool]] = []

    def load(name: str) -> torch.nn.Module:
        seen.append((current_reading().threads, current_reading().mapped))
        return torch.nn.Identity()

    with reading(given):
        load_parts(names, load, GPU, in_order=False, prepare=lambda: prepared([], worthwhile=False))
    assert seen == [(expected, False)] * len(names)


@pytest.mark.parametrize(("name", "words"), [("flash9", "is not known"), ("flash4", "needs an NVIDIA GPU")])
def test_a_backend_that_cannot_run_is_refused_before_anything_is_read(name: str, words: str) -> None:
    read: list[int] = []
    with reading(Reading(on_bytes=read.append)), pytest.raises(AttentionError, match=words):
        Pipeline.load(LoadOptions(model="tiny", device="cpu", attention=name))
    assert read == []
