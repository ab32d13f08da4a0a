"""Ranks prepare kernels while weights are read: one of a host first, none in an exchange with another."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from wan_core.config import LoadOptions, Request, compile_cache
from wan_core.config.compile_cache import one_goes_first
from wan_core.execution.memory.planning import unit_bytes
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.swap import Quantization
from wan_core.parallel.mesh import Group, Mesh, RankMesh
from wan_core.pipeline import first_use, load
from wan_core.pipeline.first_use import Ended, FirstUse
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import resolve_settings
from wan_core.pipeline.sources import find_models

CPU = torch.device("cpu")
INT8 = Quantization(Int8Linear, CPU)


@pytest.mark.parametrize(
    ("mesh", "attention"),
    [("1x1x2", "sdpa"), ("1x2x2", "math-fp8")],
)
def test_a_rank_prepares_just_what_it_will_run(ranks, tmp_path, mesh, attention):
    """The shapes of its shard in every kind of step and of its strip of the picture, in a thread that begins before
    weights are read and has ended before the first step. The video is that of ranks that prepared nothing."""
    asked = {"mesh": mesh, "folder": str(tmp_path), "attention": attention}
    plain = ranks.ask("first_use_of", **asked, prepare=False)
    answers = ranks.ask("first_use_of", **asked, decode=True)
    for answer in answers:
        assert answer["shapes"][True] == answer["shapes"][False]
        assert {kind for kind, *_ in answer["shapes"][True]} == {"dense", "sparse", "vae"}
        assert answer["begun"]["prepare"] < answer["begun"]["sample"] >= answer["ended"]["prepare"]
        assert torch.equal(answer["latents"], plain[0]["latents"])
        assert sum("kernels: prepared in" in note for note in answer["notes"]) == 1
    assert min(answer["begun"]["prepare"] for answer in answers) < min(answer["ended"]["load"] for answer in answers)
    assert not any("kernels:" in note for answer in plain for note in answer["notes"])


def test_one_rank_of_a_host_goes_first_and_later_ones_wait_for_nobody(ranks, tmp_path):
    asked = {"mesh": "1x1x3", "folder": str(tmp_path)}
    for first_time in (True, False):
        answers = ranks.ask("first_use_of", **asked)
        begun = sorted(answer["begun"]["prepare"] for answer in answers)
        ended = sorted(answer["ended"]["prepare"] for answer in answers)
        assert (ended[0] < begun[1]) is first_time


def test_ranks_that_cannot_prepare_make_the_same_video(ranks, tmp_path):
    asked = {"mesh": "1x1x2", "folder": str(tmp_path)}
    plain = ranks.ask("first_use_of", **asked, prepare=False)
    for answer in ranks.ask("first_use_of", **asked, fails=True):
        assert torch.equal(answer["latents"], plain[0]["latents"])
        said = "kernels: not prepared before they are needed: this card is too old"
        assert [said in note for note in answer["notes"] if "kernels:" in note] == [True], answer["notes"]


def in_threads(names: str, work) -> None:
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_one_goes_first_and_others_go_together(tmp_path, monkeypatch):
    """A failure lets the others go on, and is not taken for the work."""
    monkeypatch.setenv("WANCORE_CACHE", str(tmp_path))
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


def test_nobody_waits_for_ever(tmp_path, monkeypatch):
    """A process that holds the lock may be stopped: those that wait can be ended, and go on after a while."""
    monkeypatch.setenv("WANCORE_CACHE", str(tmp_path))

    def stop() -> None:
        raise Ended

    with one_goes_first("kernel"):
        with pytest.raises(Ended), one_goes_first("kernel", stop):
            raise AssertionError("another one has the lock")
        monkeypatch.setattr(compile_cache, "WAITS", 0.1)
        begin = time.monotonic()
        with one_goes_first("kernel"):
            assert time.monotonic() - begin > 0.1


def alone() -> RankMesh:
    one = Group(None, (0,), 0)
    groups = dict.fromkeys(("cfg", "ring", "ulysses", "sequence", "layers", "time", "world", "host"), one)
    return RankMesh(mesh=Mesh(), rank=0, device=CPU, control=None, **groups)


def test_a_load_that_fails_ends_the_preparation(monkeypatch):
    """Between two of its parts, and nobody waits for that but the next one, which needs its memory."""
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def work(settings, workload, ranks, check) -> None:
        inside.set()
        assert go_on.wait(10)
        check()
        seen.append("went on")

    def fail(*_, **__) -> None:
        assert inside.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(first_use, "prepares", lambda _: True)
    monkeypatch.setattr(first_use, "rehearse", work)
    monkeypatch.setattr(load, "load_parts", fail)
    request, options = Request(prompt="a red circle", steps=2), LoadOptions(model="tiny", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        Pipeline.load(options, request=request, ranks=alone())
    ended = FirstUse.latest
    assert ended is not None and ended.thread.is_alive()
    threading.Timer(0.2, go_on.set).start()
    later = FirstUse(lambda _: seen.append(ended.thread.is_alive()), CPU)
    later.thread.join(10)
    assert seen == [False] and "ended" in ended.fault


def test_a_rehearsal_needs_room_for_its_blocks():
    models = find_models(LoadOptions(model="tiny"))
    settings = resolve_settings(models, LoadOptions(model="tiny", precision="bf16"), CPU)
    other_bytes, block, *_ = unit_bytes(models.dit, 2, False)
    for spare, fits in ((other_bytes + block, True), (other_bytes + block - 1, False)):
        memory = SimpleNamespace(peak=1000, room=1000 + spare)
        assert first_use.fits_beside(settings, memory) is fits
    encoded = replace(settings, parts={n: replace(p, quantization=INT8) for n, p in settings.parts.items()})
    memory = SimpleNamespace(peak=1000, room=1000 + other_bytes + block)
    assert not first_use.fits_beside(encoded, memory)
