"""Client for the worker processes: starts them, sends requests, interrupts, watches and ends them.

    with Workers(WorkerOptions(devices=parse_devices("4", gpus=8))) as workers:
        result = generate(workers, LoadOptions(model=...), Request(prompt=...))

`processes.py` starts a supervisor process (`supervisor.py`), which starts the ranks with torch's elastic launcher. They
live until `stop`, until this process ends, or until one of them fails; then the next request starts them again.
Requests and results go over the control channel (`control.py`), to and from rank 0 alone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from wan_core.config import OptionError, UserError
from wan_core.pipeline.run import COMPILING
from wan_core.workers.control import ChannelError
from wan_core.workers.faults import describe_failure, end_of_logs, explain, place, places, rank_name
from wan_core.workers.options import WorkerOptions
from wan_core.workers.processes import STOP_SECONDS, Frame, WorkerProcesses

POLL_SECONDS = 0.1  # between two calls of `poll`
STOPPED_SECONDS = 1.0  # a wait of `POLL_SECONDS` that took so long: this process was stopped meanwhile (Ctrl+Z)
STOPPED = ": it is stopped, or its machine is overloaded"
RESTART = "All ranks were ended; the next request starts them again."
OnEvent = Callable[[dict[str, Any], dict[str, Tensor]], None]
"""Called with every event that rank 0 sends during a request: a header with "kind" and "name", and tensors."""


class WorkerError(UserError):
    """A rank failed, hung or could not start: which one, where and why. The next request starts all ranks again."""


class Workers:
    """Ranks that are started when first needed, or by `start`. Any thread may use it, one at a time."""

    def __init__(
        self, options: WorkerOptions, begin: Callable[[WorkerOptions], WorkerProcesses] = WorkerProcesses
    ) -> None:
        """begin: starts the ranks, here or on other hosts."""
        self.options, self.begin = options, begin
        self._lock = threading.RLock()
        self._processes: WorkerProcesses | None = None
        self._number = 0
        self._finalizer: weakref.finalize | None = None
        self.start_seconds = 0.0  # that the last request waited for ranks to be ready

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._processes is not None and not self._processes.ended.is_set()

    def start(self) -> None:
        """Start the ranks if none run, without waiting for them."""
        with self._lock:
            if self._processes is not None and self._processes.ended.is_set():
                self._end()
            if self._processes is None:
                self._processes = self.begin(self.options)
                self._finalizer = weakref.finalize(self, self._processes.kill)

    def stop(self) -> None:
        """End the ranks: nothing of them is left on any GPU. The next request starts them again."""
        with self._lock:
            processes = self._processes
            if processes is None:
                return
            if processes.channel is not None and not processes.ended.is_set():
                with contextlib.suppress(ChannelError):
                    processes.channel.send({"op": "shutdown", "number": self._number + 1})
                    processes.ended.wait(STOP_SECONDS)
            self._end()

    def kill(self) -> None:
        """End the ranks at once, also while a request runs in another thread: that request fails."""
        processes = self._processes
        if processes is not None:
            processes.kill()

    def _end(self) -> None:
        processes, self._processes = self._processes, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if processes is not None:
            processes.kill()

    # ------------------------------------------------------------------------------------------------------- requests

    def call(
        self,
        op: str,
        header: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        on_event: OnEvent = lambda header, tensors: None,
        poll: Callable[[], None] = lambda: None,
    ) -> Frame:
        """Send a request to all ranks and wait for rank 0's result.

        on_event and poll (ten times a second) may raise to interrupt: the ranks then stop at the next step, and the
        exception goes on. Raises WorkerError, or OptionError for what the ranks refuse.
        """
        with self._lock:
            begin = time.monotonic()
            processes = self._connect(poll)
            self.start_seconds = time.monotonic() - begin
            assert processes.channel is not None
            self._number += 1
            number = self._number
            try:
                processes.channel.send({**header, "op": op, "number": number}, tensors)
            except ChannelError:
                raise self._lost(processes) from None
            processes.begin_request(op)
            answer: Frame | None = None
            try:
                answer = self._wait(processes, number, on_event, poll)
                return _result(answer)
            except (KeyboardInterrupt, SystemExit):  # the program ends: do not wait for the next step
                self._end()
                raise
            finally:
                if answer is None and self._processes is processes:  # on_event or poll raised
                    self._interrupt(processes, number)

    def _wait(self, processes: WorkerProcesses, number: int, on_event: OnEvent, poll: Callable[[], None]) -> Frame:
        """The frame that ends the request. Raises WorkerError if ranks end or hang, and what the callbacks raise."""
        while True:
            begin = time.monotonic()
            try:
                frame = processes.inbox.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if time.monotonic() - begin < STOPPED_SECONDS:  # else what arrived meanwhile is received first
                    self._check_timeouts(processes)
                poll()
                continue
            if frame is None:
                raise self._lost(processes)
            if frame[0].get("number") != number:
                continue  # the answer to a request that was interrupted
            if frame[0]["kind"] != "event":
                return frame
            on_event(*frame)

    def _interrupt(self, processes: WorkerProcesses, number: int) -> None:
        """Have the ranks stop at the next step, and wait until they have stopped. Those that compile are ended: nothing
        stops them for minutes."""
        assert processes.channel is not None

        def end_if_compiling() -> None:
            if any(status["phase"] == COMPILING for status in processes.statuses):
                self._end()
                raise WorkerError("the ranks were compiling")

        with contextlib.suppress(WorkerError):
            try:
                processes.channel.send({"op": "interrupt", "number": number})
            except ChannelError:
                raise self._lost(processes) from None
            self._wait(processes, number, lambda header, tensors: None, end_if_compiling)

    def _connect(self, poll: Callable[[], None]) -> WorkerProcesses:
        """Ranks that are ready. If `poll` raises, they go on starting, for the next request."""
        self.start()
        processes = self._processes
        assert processes is not None
        if processes.channel is not None:
            return processes
        timeout = self.options.start_timeout
        deadline = time.monotonic() + timeout

        def check() -> None:
            if processes.ended.is_set():
                raise self._lost(processes)
            poll()

        try:
            processes.connect(timeout, check)
            while True:
                try:
                    frame = processes.inbox.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    check()
                    if time.monotonic() > deadline:
                        raise TimeoutError from None
                    continue
                if frame is None:
                    raise self._lost(processes)
                if frame[0]["kind"] == "ready":
                    return processes
        except TimeoutError:
            where = places(processes.statuses) or f"no worker connected within {timeout:g} s"
            log = end_of_logs(processes.folder)
            self._end()
            raise WorkerError(f"the workers were not ready within {timeout:g} s: {where}{log}") from None

    # --------------------------------------------------------------------------------------------------------- faults

    def _check_timeouts(self, processes: WorkerProcesses) -> None:
        options, statuses, now = self.options, processes.statuses, time.monotonic()
        since_frame = now - processes.last_frame
        if since_frame > options.heartbeat_timeout:
            where = places(statuses) or "it never reported where it is"
            self._end()
            raise WorkerError(f"rank 0 sent no heartbeat for {since_frame:.0f} s{STOPPED}; {where}. {RESTART}")
        for status in statuses:
            # By rank 0's clock: the time since rank 0's last frame does not count against the others.
            if status["since_heartbeat"] > options.heartbeat_timeout:
                self._end()
                raise WorkerError(
                    f"{rank_name(status)} sent no heartbeat for {status['since_heartbeat']:.0f} s{STOPPED}; it was "
                    f"last in {place(status)}; {places(statuses)}. {RESTART}"
                )
        # Ranks that waited for this request made no progress either.
        waits = [now - processes.request_start, *(status["since_progress"] + since_frame for status in statuses)]
        if statuses and min(waits) > options.step_timeout:
            behind = min(statuses, key=lambda status: status["count"])
            self._end()
            raise WorkerError(
                f"no rank made progress for {options.step_timeout:g} s; furthest behind is {rank_name(behind)}: "
                f"{places(statuses)}. {RESTART} If a step takes this long here, give a larger step timeout."
            )

    def _lost(self, processes: WorkerProcesses) -> WorkerError:
        """The error for ranks that have ended. Cleans up."""
        processes.ended.wait(STOP_SECONDS)  # the launcher ends the other ranks first
        text = explain(processes.report, processes.statuses, processes.process.poll())
        if processes.report is None:
            text += end_of_logs(processes.folder)
        self._end()
        return WorkerError(f"{text}. {RESTART}")


def _result(frame: Frame) -> Frame:
    """Raises what the frame that ended a request stands for, unless it is a result."""
    header = frame[0]
    if header["kind"] == "error":
        raise OptionError(header["text"]) if header["reason"] == "user" else WorkerError(describe_failure(header))
    if header["kind"] == "interrupted":
        raise WorkerError("the workers were interrupted")
    return frame
