"""The heartbeat of a rank: what it publishes, reads and survives, and when it ends the process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from wan_core.workers import faults, rank
from wan_core.workers.control import ChannelClosed
from wan_core.workers.rank import FAILED, PREFIX, Heartbeat, publish_failure

IDENTITY = {"rank": 0, "host": "h", "pid": 1, "device": "cpu"}
FAILURE = {**IDENTITY, "rank": 1, "where": "load", "reason": "user", "type": "CheckpointError", "text": "a: not found"}


class Ended(Exception):
    pass


class Program:
    """The channel to a program: calls `act` with the number of each status and keeps what was sent."""

    def __init__(self, act: Callable[[int], object]) -> None:
        self.act, self.sent = act, list[list[dict[str, Any]]]()

    def send(self, header: dict[str, Any]) -> None:
        self.sent.append(header["ranks"])
        self.act(len(self.sent))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """The rendezvous store of a process whose end raises `Ended`, with heartbeats that follow each other at once."""

    def leave(code: int) -> None:
        raise Ended(code)

    hash_store = HashStore()
    monkeypatch.setattr(rank, "rendezvous", lambda *_, **__: iter([(hash_store, 0, 1)]))
    monkeypatch.setattr(rank, "HEARTBEAT_SECONDS", 0)
    monkeypatch.setattr(rank.os, "_exit", leave)
    return hash_store


def run(size: int, act: Callable[[int], object], code: int) -> list[list[dict[str, Any]]]:
    """Statuses that rank 0 sent until it ended with `code`."""
    program: Any = Program(act)
    with pytest.raises(Ended, match=str(code)):
        Heartbeat(IDENTITY, size, program).run()
    return program.sent


def gone_after(count: int) -> Callable[[int], None]:
    def act(number: int) -> None:
        if number == count:
            raise ChannelClosed("gone")

    return act


def test_a_rank_without_memory_still_sends_heartbeats(store: HashStore) -> None:
    """The thread that needed the memory reports it. The heartbeat ends when the program is gone."""

    def act(number: int) -> None:
        if number < 3:
            raise MemoryError
        gone_after(5)(number)

    sent = run(1, act, faults.EXIT_ORPHANED)
    assert [ranks[0]["heartbeat"] for ranks in sent] == [0, 1, 2, 3, 4]


def test_the_age_of_heartbeat_and_progress(store: HashStore) -> None:
    def act(number: int) -> None:
        time.sleep(0.1)
        gone_after(4)(number)

    [status] = run(1, act, faults.EXIT_ORPHANED)[-1]
    assert status["since_heartbeat"] == 0 and status["since_progress"] >= 0.3


def test_the_failure_of_another_rank_ends_this_one_with_the_same_reason(
    store: HashStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the main thread waits for. The first failure counts; a rank's own failure does not end it here."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def act(number: int) -> None:
        if number == 3:
            publish_failure(store, FAILURE)
            publish_failure(store, {**FAILURE, "rank": 2, "reason": "peer", "text": "lost rank 1"})

    assert len(run(2, act, faults.EXIT_FAILED)) == 3
    assert json.loads((tmp_path / "error.json").read_text())["message"]["wancore"] == FAILURE
    PrefixStore(PREFIX, store).set(FAILED, json.dumps({**FAILURE, "rank": 0}))
    run(1, gone_after(3), faults.EXIT_ORPHANED)
