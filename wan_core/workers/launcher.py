"""Ranks as a program sees them that is none itself: started, asked, interrupted, watched and ended from here.

    with Workers(WorkerOptions(devices=parse_devices("4", gpus=8))) as workers:
        result = generate(workers, LoadOptions(model=...), Request(prompt=...))

Starting takes a supervisor process (`supervisor.py`), which starts the ranks with torch's elastic launcher. They live
until `stop`, until this process ends in whatever way, or until one of them fails; then the next request starts them
anew. Requests and answers go over the control channel (`control.py`) to rank 0 alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from wan_core.config import OptionError, UserError
from wan_core.workers.control import Channel, ChannelError, Listener, new_key
from wan_core.workers.explain import explain, name_of, place, places, tail_of, words_of
from wan_core.workers.options import WorkerOptions
from wan_core.workers.supervisor import Orders

ROOT = Path(__file__).resolve().parents[2]  # what must be importable in the ranks
TICK = 0.1  # seconds between two looks at whether the user interrupts
STOP_SECONDS = 5.0  # for ranks that are told to end
ANEW = "All ranks were ended; the next request starts them anew."
Event = Callable[[dict[str, Any], dict[str, Tensor]], None]
"""Told of everything that rank 0 says while a request runs: a header with "kind" and "name", and tensors."""


class WorkerError(UserError):
    """A rank failed, hung or could not start; the message says which one, where and why. The next request starts all
    ranks anew."""


# ---------------------------------------------------------------------------------------------------------- the workers


class _Running:
    """What exists while ranks do. Threads know this, never `Workers`: which could not be dropped then."""

    def __init__(self, options: WorkerOptions) -> None:
        self.key = new_key()
        self.inbox: queue.SimpleQueue[tuple[dict[str, Any], dict[str, Tensor]] | None] = queue.SimpleQueue()
        self.channel: Channel | None = None
        self.statuses: list[dict[str, Any]] = []
        self.heard = self.begun = time.monotonic()  # the last frame, and the request in work
        self.report: dict[str, Any] | None = None
        self.ended = threading.Event()
        with contextlib.ExitStack() as undo:
            self.listener = Listener(self.key)
            undo.callback(self.listener.close)
            self.folder = tempfile.mkdtemp(prefix="wancore-workers-")
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            orders = Orders(
                key=self.key.hex(),
                port=self.listener.port,
                devices=options.devices,
                run_id=options.run_id or uuid.uuid4().hex,
                log_dir=self.folder,
                start_timeout=options.start_timeout,
                step_timeout=options.step_timeout,
                nodes=options.nodes,
                rendezvous=options.rendezvous,
            )
            self.process = self._start()
            undo.callback(self.process.kill)
            assert self.process.stdin is not None
            self.process.stdin.write((json.dumps(asdict(orders)) + "\n").encode())
            self.process.stdin.flush()  # and stays open: its end tells the supervisor that this process is gone
            undo.pop_all()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(Path(self.folder) / "supervisor.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "wan_core.workers.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # Ctrl+C in a terminal is for this process; it tells the others
            )

    def _await_end(self) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.read().decode(errors="replace").strip()
        self.process.wait()
        if said:
            self.report = json.loads(said.splitlines()[-1])
        self.ended.set()
        self.inbox.put(None)

    def open(self, channel: Channel) -> None:
        self.channel = channel
        self.heard = time.monotonic()
        threading.Thread(target=self._listen, args=(channel,), daemon=True).start()

    def _listen(self, channel: Channel) -> None:
        try:
            while True:
                header, tensors = channel.receive()
                self.heard = time.monotonic()
                if header["kind"] == "status":
                    self.statuses = header["ranks"]
                else:
                    self.inbox.put((header, tensors))
        except (ChannelError, OSError, KeyError):
            self.inbox.put(None)

    def kill(self) -> None:
        """End everything now. The ranks go with their supervisor, in whatever state they are."""
        with contextlib.suppress(OSError):
            self.process.kill()
        self.close()

    def close(self) -> None:
        self.ended.wait(STOP_SECONDS)
        if self.channel is not None:
            self.channel.close()
        self.listener.close()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Workers:
    """Ranks that are started when first needed, or by `start`. Any thread may use it, one at a time."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self._lock = threading.RLock()
        self._running: _Running | None = None
        self._number = 0
        self._finalizer: weakref.finalize | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.ended.is_set()

    def start(self) -> None:
        """Start the ranks if none run, without waiting for them."""
        with self._lock:
            if self._running is not None and self._running.ended.is_set():
                self._drop()
            if self._running is None:
                self._running = _Running(self.options)
                self._finalizer = weakref.finalize(self, self._running.kill)

    def stop(self) -> None:
        """End the ranks: nothing of them is left on any GPU. The next request starts them again."""
        with self._lock:
            running = self._running
            if running is None:
                return
            if running.channel is not None and not running.ended.is_set():
                with contextlib.suppress(ChannelError):
                    running.channel.send({"op": "shutdown", "number": self._number + 1})
                    running.ended.wait(STOP_SECONDS)
            self._drop()

    def kill(self) -> None:
        """As `stop`, without asking: also while a request runs in another thread, which fails then."""
        running = self._running
        if running is not None:
            running.kill()

    def _drop(self) -> None:
        running, self._running = self._running, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if running is not None:
            running.kill()

    # ------------------------------------------------------------------------------------------------------- requests

    def call(
        self,
        op: str,
        header: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        on_event: Event = lambda header, tensors: None,
        poll: Callable[[], None] = lambda: None,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Ask all ranks for something and wait for rank 0's result.

        on_event and poll (ten times a second) may raise to interrupt: then the ranks stop at the next step, and what
        was raised goes on. Raises WorkerError, and OptionError for what the ranks refuse.
        """
        with self._lock:
            running = self._connect(poll)
            assert running.channel is not None
            self._number += 1
            number = self._number
            try:
                running.channel.send({**(header or {}), "op": op, "number": number}, tensors)
            except ChannelError:
                raise self._lost(running, op) from None
            running.heard = running.begun = time.monotonic()
            fresh = {"phase": f"the begin of {op}", "step": 0, "of": 0, "silent": 0.0, "still": 0.0}
            running.statuses = [{**status, **fresh} for status in running.statuses]
            try:
                return self._wait(running, number, op, on_event, poll)
            except (WorkerError, OptionError):
                raise
            except Exception:
                self._interrupt(running, number, op)
                raise
            except BaseException:  # the program ends: no time for manners
                self._drop()
                raise

    def _wait(
        self, running: _Running, number: int, op: str, on_event: Event, poll: Callable[[], None]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        while True:
            try:
                frame = running.inbox.get(timeout=TICK)
            except queue.Empty:
                self._watch(running, op)
                poll()
                continue
            if frame is None:
                raise self._lost(running, op)
            header, tensors = frame
            if header.get("number") != number:
                continue  # the answer to what was interrupted
            kind = header["kind"]
            if kind in ("result", "pong"):
                return header, tensors
            if kind == "error":
                text = header["text"]
                raise OptionError(text) if header["reason"] == "user" else WorkerError(words_of(header))
            if kind == "interrupted":
                raise WorkerError("the workers were interrupted")
            on_event(header, tensors)

    def _interrupt(self, running: _Running, number: int, op: str) -> None:
        """Have the ranks stop at the next step, and wait until they have."""
        assert running.channel is not None
        with contextlib.suppress(WorkerError, OptionError):
            try:
                running.channel.send({"op": "interrupt", "number": number})
            except ChannelError:
                raise self._lost(running, op) from None
            self._wait(running, number, op, lambda header, tensors: None, lambda: None)

    def _connect(self, poll: Callable[[], None]) -> _Running:
        """Ranks that are ready. What `poll` raises leaves them starting, for the next request."""
        self.start()
        running = self._running
        assert running is not None
        if running.channel is not None:
            return running
        begin = time.monotonic()

        def check() -> None:
            if running.ended.is_set():
                raise self._lost(running, "start")
            poll()

        def left() -> float:
            return self.options.start_timeout - (time.monotonic() - begin)

        late = f"the workers were not ready within {self.options.start_timeout:g} s"
        try:
            running.open(running.listener.accept(left(), check))
            while True:
                try:
                    frame = running.inbox.get(timeout=TICK)
                except queue.Empty:
                    check()
                    if left() < 0:
                        raise TimeoutError from None
                    continue
                if frame is None:
                    raise self._lost(running, "start")
                if frame[0]["kind"] == "ready":
                    return running
        except TimeoutError:
            words = f"{late}: {places(running.statuses) or 'none of them came to talk'}"
            tail = tail_of(running.folder)
            self._drop()
            raise WorkerError(f"{words}{tail}") from None

    # ---------------------------------------------------------------------------------------------------- what is wrong

    def _watch(self, running: _Running, op: str) -> None:
        """Raise WorkerError if a rank hangs."""
        options, statuses = self.options, running.statuses
        silent = time.monotonic() - running.heard
        if silent > options.silence:
            where = places(statuses) or "it never said where it is"
            self._drop()
            raise WorkerError(
                f"{op}: rank 0 gave no sign of life for {silent:.0f} s (stopped, or its machine is overloaded): "
                f"{where}. {ANEW}"
            )
        for status in statuses:
            if status["silent"] > options.silence:  # as rank 0 had it: while that is silent, nobody knows of others
                self._drop()
                raise WorkerError(
                    f"{op}: {name_of(status)} gave no sign of life for {status['silent']:.0f} s, it was last in "
                    f"{place(status)}; {places(statuses)}. {ANEW}"
                )
        # Ranks that had nothing to do before this request stood still, too.
        still = min([time.monotonic() - running.begun, *(status["still"] + silent for status in statuses)])
        if statuses and still > options.step_timeout:
            behind = min(statuses, key=lambda status: status["count"])
            self._drop()
            raise WorkerError(
                f"{op}: no rank got any further for {options.step_timeout:g} s; furthest behind is {name_of(behind)}: "
                f"{places(statuses)}. {ANEW} If this is how long a step takes here, give a larger step timeout."
            )

    def _lost(self, running: _Running, op: str) -> WorkerError:
        """Rank 0 or the supervisor is gone: find out why, and clean up."""
        running.ended.wait(STOP_SECONDS)  # the launcher ends the other ranks first
        words = explain(running.report, running.statuses, running.process.poll())
        if "said nothing" in words:
            words += tail_of(running.folder)
        self._drop()
        return WorkerError(f"{op}: {words}. {ANEW}")
