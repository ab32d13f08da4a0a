"""Ranks as a program sees them that is none itself: started, asked, interrupted, watched and ended from here.

    with Workers(WorkerOptions(devices=parse_devices("4", gpus=8))) as workers:
        result = workers.generate(LoadOptions(model=...), Request(prompt=...))

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from wan_core.config import OptionError, UserError
from wan_core.parallel.control import Channel, ChannelError, Listener, new_key
from wan_core.parallel.mesh import Mesh
from wan_core.parallel.supervisor import Orders

ROOT = Path(__file__).resolve().parents[2]  # what must be importable in the ranks
TICK = 0.1  # seconds between two looks at whether the user interrupts
STOP_SECONDS = 5.0  # for ranks that are told to end
Event = Callable[[dict[str, Any], dict[str, Tensor]], None]
"""Told of everything that rank 0 says while a request runs: a header with "kind" and "name", and tensors."""


class WorkerError(UserError):
    """A rank failed, hung or could not start; the message says which one, where and why. The next request starts all
    ranks anew."""


# -------------------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The ranks of this host, and how long to wait for them, in seconds.

    start_timeout: until all ranks are there. step_timeout: for any rank to get somewhere, a step further or to the next
    phase. silence: for a sign of life of each. nodes, rendezvous, run_id: across hosts, HOST:PORT where they meet and
    the name that they share.
    """

    devices: tuple[str, ...]
    mesh: str = "auto"
    start_timeout: float = 300.0
    step_timeout: float = 600.0
    silence: float = 60.0
    nodes: int = 1
    rendezvous: str | None = None
    run_id: str | None = None

    def __post_init__(self) -> None:
        if sys.platform == "win32":
            raise OptionError("several GPUs need NCCL, which torch does not have on Windows: use one GPU, or WSL")
        if not self.devices:
            raise OptionError("no device given for the workers")
        for name in ("start_timeout", "step_timeout", "silence"):
            if not 1 <= getattr(self, name) <= 86400:
                raise OptionError(f"{name} {getattr(self, name):g} given; allowed are 1 to 86400 seconds")
        if self.nodes < 1 or (self.nodes > 1) != (self.rendezvous is not None):
            raise OptionError(
                f"{self.nodes} hosts given: more than one need a rendezvous, HOST:PORT, and one needs none"
            )
        if self.rendezvous is not None and not self.rendezvous.rpartition(":")[2].isdecimal():
            raise OptionError(f"rendezvous {self.rendezvous!r} given; write HOST:PORT of one of the hosts")
        if self.mesh != "auto":
            mesh = Mesh.parse(self.mesh)
            if self.nodes == 1 and mesh.size != len(self.devices):
                raise OptionError(
                    f"mesh {mesh} needs {mesh.size} ranks, and {len(self.devices)} devices are given: "
                    f"{', '.join(self.devices)}"
                )


def parse_devices(text: str, gpus: int) -> tuple[str, ...]:
    """The devices that a user means: `auto` or `all` (every GPU), how many, or a list like `0,1`, `cuda:2,cuda:3`,
    `cpu,cpu`. gpus: that this machine has. Raises OptionError."""
    said = text.strip().lower()
    if said in ("auto", "all"):
        if not gpus:
            raise OptionError("torch sees no NVIDIA GPU here: name the devices, for example cpu,cpu to try it out")
        return tuple(f"cuda:{i}" for i in range(gpus))
    if said.isdecimal():
        if not 1 <= int(said) <= gpus:
            raise OptionError(
                f"{said} GPUs given, and torch sees {gpus} here: give at most as many, or a list of devices (0,2 or cpu,cpu)"
            )
        return tuple(f"cuda:{i}" for i in range(int(said)))
    names = [name.strip() for name in said.split(",")]
    names = [f"cuda:{name}" if name.isdecimal() else name for name in names]
    for name in names:
        kind, _, index = name.partition(":")
        if name != "cpu" and (kind != "cuda" or not index.isdecimal()):
            raise OptionError(f"device {name!r} is not known; write a number of GPUs, or a list like 0,1 or cpu,cpu")
        if kind == "cuda" and int(index) >= gpus:
            raise OptionError(f"device {name!r} given, and torch sees {gpus} NVIDIA GPUs here")
    if len(set(names)) < len(names) and set(names) != {"cpu"}:
        raise OptionError(f"devices {text!r} given; every GPU serves one rank, and CPUs are not mixed with GPUs")
    if "cpu" in names and set(names) != {"cpu"}:
        raise OptionError(f"devices {text!r} given; CPUs and GPUs do not work together")
    return tuple(names)


# ---------------------------------------------------------------------------------------------------------- the workers


class _Running:
    """What exists while ranks do. Threads know this, never `Workers`: which could not be dropped then."""

    def __init__(self, options: WorkerOptions) -> None:
        self.key = new_key()
        self.listener = Listener(self.key)
        self.folder = tempfile.mkdtemp(prefix="wancore-workers-")
        self.inbox: queue.SimpleQueue[tuple[dict[str, Any], dict[str, Tensor]] | None] = queue.SimpleQueue()
        self.channel: Channel | None = None
        self.statuses: list[dict[str, Any]] = []
        self.heard = time.monotonic()
        self.report: dict[str, Any] | None = None
        self.ended = threading.Event()
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
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(Path(self.folder) / "supervisor.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "wan_core.parallel.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # Ctrl+C in a terminal is for this process; it tells the others
            )
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(asdict(orders)) + "\n").encode())
        self.process.stdin.flush()  # and stays open: its end tells the supervisor that this process is gone
        threading.Thread(target=self._await_end, daemon=True).start()

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
            running.heard = time.monotonic()
            running.statuses = []
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
            if kind == "result":
                return header, tensors
            if kind == "error":
                text = header["text"]
                raise OptionError(text) if header["reason"] == "user" else WorkerError(_words(header))
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
        """Ranks that are ready."""
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
            words = f"{late}: {_places(running.statuses) or 'none of them came to talk'}"
            tail = _tail(running.folder)
            self._drop()
            raise WorkerError(f"{words}{tail}") from None
        except BaseException:
            self._drop()
            raise

    # ---------------------------------------------------------------------------------------------------- what is wrong

    def _watch(self, running: _Running, op: str) -> None:
        """Raise WorkerError if a rank hangs."""
        options, statuses = self.options, running.statuses
        silent = time.monotonic() - running.heard
        if silent > options.silence:
            where = _places(statuses) or "it never said where it is"
            self._drop()
            raise WorkerError(
                f"{op}: rank 0 gave no sign of life for {silent:.0f} s (stopped, or its machine is overloaded): {where}. "
                "All ranks were ended; the next request starts them anew."
            )
        for status in statuses:
            if status["silent"] + silent > options.silence:
                self._drop()
                raise WorkerError(
                    f"{op}: {_name(status)} gave no sign of life for {status['silent']:.0f} s, it was last in "
                    f"{_place(status)}; {_places(statuses)}. All ranks were ended; the next request starts them anew."
                )
        if statuses and min(status["still"] for status in statuses) + silent > options.step_timeout:
            behind = min(statuses, key=lambda status: status["count"])
            self._drop()
            raise WorkerError(
                f"{op}: no rank got any further for {options.step_timeout:g} s; the furthest behind is {_name(behind)}: "
                f"{_places(statuses)}. All ranks were ended; the next request starts them anew. If this is how long a "
                "step takes here, give a larger step timeout."
            )

    def _lost(self, running: _Running, op: str) -> WorkerError:
        """Rank 0 or the supervisor is gone: find out why, and clean up."""
        running.ended.wait(STOP_SECONDS)  # the launcher ends the other ranks first
        words = _explain(running.report, running.statuses, running.process.poll())
        if "said nothing" in words:
            words += _tail(running.folder)
        self._drop()
        return WorkerError(f"{op}: {words}. All ranks were ended; the next request starts them anew.")


# --------------------------------------------------------------------------------------------------------------- words


def _name(status: Mapping[str, Any]) -> str:
    device = f", {status['device']}" if "device" in status else ""
    return f"rank {status['rank']} on {status['host']} (process {status['pid']}{device})"


def _place(status: Mapping[str, Any]) -> str:
    return f"{status['phase']}, step {status['step']} of {status['of']}" if status["of"] else status["phase"]


def _places(statuses: Sequence[Mapping[str, Any]]) -> str:
    """`rank 0: denoise, step 3 of 20; rank 1: ...`."""
    return "; ".join(f"rank {status['rank']}: {_place(status)}" for status in statuses)


REASONS = {
    "memory": "ran out of memory",
    "disk": "could not write, because the disk is full or a file may not grow",
    "peer": "lost the other ranks, or waited too long for them",
    "fault": "failed",
    "user": "was refused",
}


def _words(said: Mapping[str, Any]) -> str:
    """One sentence of what a rank said last."""
    advice = {
        "memory": ". A smaller size, fewer frames, residency swap or more GPUs need less on each",
        "peer": ". Look at the other ranks: is one gone, slow or cut off?",
    }
    text = " ".join(str(said["text"]).split())[:600]
    name = said["type"] if said["reason"] == "fault" else "it said"
    words = f"{_name(said)} {REASONS[said['reason']]} in {said['where']}; {name}: {text}"
    return words + advice.get(said["reason"], "")


def _explain(report: dict[str, Any] | None, statuses: Sequence[Mapping[str, Any]], exit_code: int | None) -> str:
    """Why the ranks ended, from what the supervisor reported (None: it did not get to it)."""
    if report is None:
        how = f"ended with {exit_code}" if exit_code is not None else "does not answer"
        return f"the supervisor of the ranks {how} and said nothing; {_places(statuses)}"
    if "error" in report:
        return report["error"]
    failures = report.get("failures", [])
    if not failures:
        return "rank 0 left without a reason"
    place = {status["rank"]: status for status in statuses}

    def words(failure: Mapping[str, Any]) -> str:
        if failure["said"] is not None:
            return _words(failure["said"])
        status = place.get(failure["rank"])
        name = _name(status) if status else f"rank {failure['rank']} (process {failure['pid']})"
        where = f" in {_place(status)}" if status else ""
        if failure["signal"]:
            killer = ": something outside ended it, often the system because memory ran out" * (
                failure["signal"] == "SIGKILL"
            )
            return f"{name} was ended by signal {-failure['exit']} ({failure['signal']}){where}{killer}{_last(failure['tail'])}"
        return f"{name} ended with code {failure['exit']}{where}{_last(failure['tail'])}"

    # The others fail because one did: what they say about it comes last.
    causes = [f for f in failures if f["said"] is None or f["said"]["reason"] != "peer"] or failures
    return "; ".join(words(failure) for failure in causes)


def _last(tail: str) -> str:
    lines = [line for line in tail.splitlines() if line.strip()]
    return f"; its last words: {' | '.join(lines[-3:])[:500]}" if lines else ""


def _tail(folder: str) -> str:
    """The end of what was logged, for a failure that nobody explained."""
    logs = [*sorted(Path(folder).glob("**/stderr.log")), Path(folder) / "supervisor.log"]
    texts = [log.read_text(errors="replace").strip() for log in logs if log.is_file()]
    return _last(next((text for text in texts if text), ""))
