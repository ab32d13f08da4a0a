"""What the launcher says of ranks that failed, hang or are late, without starting one."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from wan_core.pipeline.run import COMPILING
from wan_core.workers.faults import explain
from wan_core.workers.launcher import WorkerError, Workers
from wan_core.workers.options import WorkerOptions

STATUS = {"rank": 0, "host": "h", "pid": 1, "device": "cpu", "phase": "load", "step": 0, "of": 0, "count": 3}


def test_the_rank_that_failed_is_named_and_not_those_that_lost_it() -> None:
    def failure(rank: int, said: dict[str, Any] | None, exit: int = 1) -> dict[str, Any]:
        signal = {-7: "SIGBUS", -9: "SIGKILL", -15: "SIGTERM"}.get(exit)
        return {"rank": rank, "pid": 100 + rank, "exit": exit, "signal": signal, "said": said, "tail": "oh\n\nno\n"}

    def said(rank: int, reason: str, text: str) -> dict[str, Any]:
        where = {"rank": rank, "host": "h", "pid": 100 + rank, "device": "cuda:1", "where": "denoise high, step 3 of 9"}
        return {**where, "reason": reason, "type": "RuntimeError", "text": text}

    statuses = [{**STATUS, "phase": "decode", "rank": rank, "pid": 100 + rank} for rank in range(2)]
    lost = failure(0, said(0, "peer", "Connection closed by peer"))
    message = explain({"failures": [lost, failure(1, said(1, "memory", "tried to allocate 9 GiB"))]}, statuses, 1)
    assert message.startswith("rank 1 on h (process 101, cuda:1) ran out of memory in denoise high, step 3 of 9")
    assert "9 GiB" in message and "Connection closed" not in message
    message = explain({"failures": [lost, failure(1, None, -9)]}, statuses, 1)
    assert (
        "rank 1 on h (process 101, cpu) was ended by signal 9 (SIGKILL) in decode" in message and "oh | no" in message
    )
    ended = failure(0, None, -15)  # by the launcher, because another failed
    assert "rank 0" not in explain({"failures": [ended, failure(1, None, -9)]}, statuses, 1)
    assert "SIGTERM" in explain({"failures": [ended]}, statuses, 1)
    assert "Connection closed" in explain({"failures": [lost]}, statuses, 1)
    reported = failure(0, said(1, "user", "a.safetensors: cannot be read"))  # by rank 0, of rank 1 on another host
    for failures in ([reported], [reported, failure(1, None)], [reported, failure(1, reported["said"])]):
        message = explain({"failures": failures}, statuses, 1)
        assert message.startswith("rank 1 on h (process 101, cuda:1) refused the request in denoise high, step 3 of 9")
        assert message.count("a.safetensors: cannot be read") == 1 and "rank 0" not in message
    assert "became shorter" in explain({"failures": [failure(1, None, -7)]}, statuses, 1)
    assert "ended with code -9" in explain(None, statuses, -9)


def test_idle_ranks_are_not_taken_for_ranks_that_hang() -> None:
    """Their last status before a request still counts the time since the request before."""
    workers = Workers(WorkerOptions(devices=("cpu",), step_timeout=10))
    now, idle = time.monotonic(), {**STATUS, "phase": "idle", "since_heartbeat": 0.1, "since_progress": 4000.0}
    running: Any = SimpleNamespace(statuses=[idle], last_frame=now, request_start=now)
    workers._check_timeouts(running)
    running.request_start -= 11
    with pytest.raises(WorkerError, match="no rank made progress for 10 s"):
        workers._check_timeouts(running)


def test_a_late_rank_0_does_not_make_the_others_late() -> None:
    """Rank 0 reports how old the heartbeats of the others are; the age of its own report does not count."""
    workers = Workers(WorkerOptions(devices=("cpu", "cpu"), heartbeat_timeout=10))
    statuses = [{**STATUS, "rank": rank, "since_heartbeat": 1.0 * rank, "since_progress": 0.0} for rank in range(2)]
    now = time.monotonic()
    running: Any = SimpleNamespace(statuses=statuses, last_frame=now - 9.5, request_start=now)
    workers._check_timeouts(running)
    running.last_frame -= 1
    with pytest.raises(WorkerError, match=r"rank 0 sent no heartbeat for 1[01] s"):
        workers._check_timeouts(running)
    running.last_frame, statuses[1]["since_heartbeat"] = now, 11.0
    with pytest.raises(WorkerError, match=r"rank 1 .* sent no heartbeat for 11 s"):
        workers._check_timeouts(running)


@pytest.mark.parametrize("phase", [COMPILING, "denoise high"])
def test_ranks_that_compile_are_ended_where_the_user_interrupts(phase: str) -> None:
    """They would go on for minutes. Others are waited for: they stop at the next block and keep their models."""

    class Enough(Exception):
        pass

    class Ranks:
        """They answer an interruption only where they do not compile."""

        def __init__(self, *_: Any) -> None:
            self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self.statuses = [{**STATUS, "since_heartbeat": 0.0, "since_progress": 0.0}]
            self.last_frame = self.request_start = time.monotonic()
            self.ended, self.channel, self.killed = threading.Event(), self, False

        def send(self, header: dict[str, Any], tensors: Any = None) -> None:
            if header["op"] == "interrupt" and phase != COMPILING:
                self.inbox.put(({"kind": "interrupted", "number": header["number"]}, {}))

        def begin_request(self, op: str) -> None:
            pass

        def kill(self) -> None:
            self.killed = True

    running = Ranks()
    workers = Workers(WorkerOptions(devices=("cpu",)), lambda _: running)

    def poll() -> None:
        running.statuses = [{**running.statuses[0], "phase": phase}]
        raise Enough

    begin = time.monotonic()
    with pytest.raises(Enough):
        workers.call("generate", {}, {}, poll=poll)
    assert time.monotonic() - begin < 5 and running.killed == (phase == COMPILING) != workers.is_running
