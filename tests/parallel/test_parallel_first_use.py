"""A rank prepares kernels while weights are read; one process of a host goes first."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest
import torch

from wan_core.config import LoadOptions, Request, compile_cache
from wan_core.config.compile_cache import one_goes_first
from wan_core.parallel.mesh import Group, Mesh, RankMesh
from wan_core.pipeline import first_use, load
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import ModelSettings

CPU = torch.device("cpu")
REQUEST = Request(prompt="a red circle", steps=2)
OPTIONS = LoadOptions(model="tiny", device="cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WANCORE_CACHE", str(tmp_path))


def loaded(monkeypatch, prepare: bool = True) -> Pipeline:
    """The embedded model on one rank, as on a GPU."""
    one = Group(None, (0,), 0)
    groups = dict.fromkeys(("cfg", "ring", "ulysses", "sequence", "layers", "time", "world", "host"), one)
    ranks = RankMesh(mesh=Mesh(), rank=0, device=CPU, control=None, **groups)
    monkeypatch.setattr(load, "prepares", lambda _: prepare)
    return Pipeline.load(OPTIONS, request=REQUEST, ranks=ranks)


def made(pipe: Pipeline) -> tuple[torch.Tensor, list[str]]:
    """The latents of a video, and the notes about kernels."""
    run = pipe.prepare(REQUEST)
    latents = pipe.sample(run, pipe.encode(run))
    return latents, [note for note in pipe.report.notes if "kernels:" in note]


def test_kernels_of_a_block_are_prepared_by_one_process_of_a_host_first(monkeypatch):
    """The first step waits for that, and the video is the same."""
    latents, notes = made(loaded(monkeypatch, prepare=False))
    assert not notes
    names = list[str]()
    monkeypatch.setattr(first_use, "compiled_name", lambda settings: names.append(settings.attention) or "kernels")
    with one_goes_first("kernels"):
        pipe = loaded(monkeypatch)
        assert pipe.models.first_use is not None and pipe.models.first_use.thread.is_alive()
    prepared, notes = made(pipe)
    assert torch.equal(prepared, latents) and names == [pipe.models.attention]
    assert len(notes) == 1 and "kernels: prepared in" in notes[0]


def test_a_rank_that_cannot_prepare_makes_the_same_video(monkeypatch):
    latents, _ = made(loaded(monkeypatch, prepare=False))

    def fail(settings: ModelSettings, device: torch.device) -> None:
        raise RuntimeError("this card is too old")

    monkeypatch.setattr(first_use, "load_kernels", fail)
    prepared, notes = made(loaded(monkeypatch))
    assert torch.equal(prepared, latents)
    assert len(notes) == 1 and "kernels: not prepared before they are needed: this card is too old" in notes[0]


def in_threads(names: str, work) -> None:
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_one_goes_first_and_others_go_together():
    """A failure lets the others go on, and is not taken for the work."""
    order, inside, together = [], threading.Event(), threading.Barrier(2, timeout=10)

    def fail(_: str) -> None:
        with suppress(ValueError), one_goes_first("kernel"):
            inside.set()
            time.sleep(0.3)
            order.append("first")
            raise ValueError

    def follow(name: str) -> None:
        inside.wait(10)
        with one_goes_first("kernel"):
            order.append(name)
            together.wait()

    failing = threading.Thread(target=fail, args=("",))
    failing.start()
    in_threads("ab", follow)
    failing.join()
    assert order[0] == "first" and sorted(order[1:]) == ["a", "b"]
    with one_goes_first("kernel"), one_goes_first("other"):
        pass
    in_threads("ab", follow)  # done once: both are inside at the same time


def test_nobody_waits_for_ever(monkeypatch):
    """A process that holds the lock may be stopped: those that wait go on after a while."""
    with one_goes_first("kernel"):
        monkeypatch.setattr(compile_cache, "WAITS", 0.1)
        begin = time.monotonic()
        with one_goes_first("kernel"):
            assert time.monotonic() - begin > 0.1
