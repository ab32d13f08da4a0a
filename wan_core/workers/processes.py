"""The started worker processes: the supervisor, the control channel to rank 0, and what both report."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wan_core.config.temporary import own_folder
from wan_core.workers.control import Channel, ChannelError, Listener, new_key
from wan_core.workers.options import WorkerOptions
from wan_core.workers.supervisor import SupervisorOptions

if TYPE_CHECKING:
    from wan_core.workers.rendezvous import Meeting

ROOT = Path(__file__).resolve().parents[2]  # must be importable in the ranks
STOP_SECONDS = 5.0  # for ranks that are told to end
Frame = tuple[dict[str, Any], dict[str, Tensor]]


def rank_environment() -> dict[str, str]:
    """This process's, without the choice of CUDA's own allocator: ComfyUI makes it for itself. Ranks take torch's, as
    on the command line, with which they were tested and measured."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        options = [option for option in environment.pop(name, "").split(",") if "cudaMallocAsync" not in option]
        if any(options):
            environment[name] = ",".join(options)
    return environment


class WorkerProcesses:
    """Supervisor and ranks, from their start to their end. Its threads hold no reference to `launcher.Workers`, so that
    an unused `Workers` is collected and ends its processes.

    inbox: frames of rank 0; None: the ranks have ended. channel: to rank 0, from when it is connected. report: of their
    end, see `faults.explain`.
    """

    def __init__(
        self,
        options: WorkerOptions,
        meeting: Meeting | None = None,
        *,
        program: str = "wan_core.workers.supervisor",
        **more: Any,
    ) -> None:
        """meeting: of a run over several hosts. program: the module that starts the ranks and reports their end. more:
        fields of the `SupervisorOptions` that it reads."""
        self.key = new_key()
        self.inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.channel: Channel | None = None
        self.statuses: list[dict[str, Any]] = []
        self.last_frame = self.request_start = time.monotonic()
        self.report: dict[str, Any] | None = None
        self.ended = threading.Event()
        with contextlib.ExitStack() as undo:
            self.listener = Listener(self.key)
            undo.callback(self.listener.close)
            self.folder = str(own_folder("workers"))
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            sent = SupervisorOptions(
                key=self.key.hex(),
                port=self.listener.port,
                devices=options.devices,
                log_dir=self.folder,
                start_timeout=options.start_timeout,
                step_timeout=options.step_timeout,
                heartbeat_timeout=options.heartbeat_timeout,
                meeting=None if meeting is None else asdict(meeting),
                **{"run_id": uuid.uuid4().hex, **more},
            )
            passed = () if meeting is None or meeting.descriptor is None else (meeting.descriptor,)
            self.process = self._start(program, passed)
            undo.callback(self.process.kill)
            assert self.process.stdin is not None
            self.process.stdin.write((json.dumps(asdict(sent)) + "\n").encode())
            self.process.stdin.flush()  # stays open: its end tells the supervisor that this process has ended
            undo.pop_all()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _start(self, program: str, descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
        with open(Path(self.folder) / "supervisor.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=rank_environment(),
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl+C in a terminal reaches this process alone, which tells the others
            )

    def _await_end(self) -> None:
        assert self.process.stdout is not None
        text = self.process.stdout.read().decode(errors="replace").strip()
        self.process.wait()
        if text:
            self.report = json.loads(text.splitlines()[-1])
        self.ended.set()
        self.inbox.put(None)

    def begin_request(self, op: str) -> None:
        """The timeouts of a request start now; what was known of the ranks is older than it."""
        self.last_frame = self.request_start = time.monotonic()
        fresh = {"phase": f"start of {op}", "step": 0, "of": 0, "since_heartbeat": 0.0, "since_progress": 0.0}
        self.statuses = [{**status, **fresh} for status in self.statuses]

    def connect(self, timeout: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait for the connection to rank 0. `check` is called ten times a second, may raise. Raises TimeoutError."""
        self.channel = channel = self.listener.accept(timeout, check)
        self.last_frame = time.monotonic()
        threading.Thread(target=self._receive, args=(channel,), daemon=True).start()

    def _receive(self, channel: Channel) -> None:
        try:
            while True:
                header, tensors = channel.receive()
                self.last_frame = time.monotonic()
                if header["kind"] == "status":
                    self.statuses = header["ranks"]
                else:
                    self.inbox.put((header, tensors))
        except (ChannelError, OSError, KeyError):
            self.inbox.put(None)

    def kill(self) -> None:
        """End everything now. The kernel kills the ranks with their supervisor, whatever they do."""
        with contextlib.suppress(OSError):
            self.process.kill()
        self.ended.wait(STOP_SECONDS)
        if self.channel is not None:
            self.channel.close()
        self.listener.close()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)
