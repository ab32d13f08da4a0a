"""Ranks prepare kernels while weights are read: one of a host first, none in an exchange with another."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks import their checks by these names, and so must we
from parallel_ranks import Ranks

from wan_core.config.compile_cache import one_goes_first


@pytest.fixture(scope="module")
def ranks():
    found = Ranks(4)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("mesh", "attention"),
    [("1x1x2", "math-fp8"), ("1x2x2", "math-fp8"), ("2x2x1", "sdpa")],
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
    asked = {"mesh": "1x1x4", "folder": str(tmp_path)}
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
