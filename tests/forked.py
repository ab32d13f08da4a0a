"""Python processes that begin as copies of this one, which has imported torch already: `Forked` stands in the place of
`subprocess.Popen` and of what torch's launcher starts ranks with.

Between a process that is started and one that is copied lie three seconds of importing; all else is as if it had been
started: its command, environment, pipes, session and parent, and no open file of its parent's but those passed. A
test that proves how workers are started must start them; one that kills them may take copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from wan_core.workers import processes

M_MMAP_THRESHOLD = -3  # malloc.h
PR_SET_PDEATHSIG = 1  # prctl.h
SUPERVISOR = "wan_core.workers.supervisor"


class Start(NamedTuple):
    """What `Popen` gives to the place where it starts a process; what follows there is not used here, and differs
    between versions."""

    args: Sequence[str]
    executable: Any
    preexec_fn: Callable[[], object] | None
    close_fds: bool
    pass_fds: Any
    cwd: Any
    env: Mapping[str, str] | None
    startupinfo: Any
    creationflags: int
    shell: bool
    p2cread: int
    p2cwrite: int
    c2pread: int
    c2pwrite: int
    errread: int
    errwrite: int

    @property
    def theirs(self) -> tuple[int, int, int]:
        """The child's ends of its three streams; -1: its parent's."""
        return self.p2cread, self.c2pwrite, self.errwrite

    @property
    def ours(self) -> tuple[int, int, int]:
        return self.p2cwrite, self.c2pread, self.errread


class Forked(subprocess.Popen):
    """Popen of `PYTHON [-u] -m MODULE ...` or `PYTHON -c CODE`. Where CUDA is in use, which no copy survives, it starts
    the command as ever."""

    def _execute_child(self, *arguments: Any) -> None:  # `Popen`'s own place for it
        start = Start(*arguments[: len(Start._fields)])
        if torch.cuda.is_initialized():
            super()._execute_child(*arguments)  # pyright: ignore
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a copy goes on with this thread alone, and the others hold nothing of it
            self.pid = os.fork()
        if self.pid == 0:
            become(list(start.args), start.preexec_fn, start.cwd, start.env, start.theirs, start.pass_fds)
        self._child_created = True
        for theirs, ours in zip(start.theirs, start.ours, strict=True):
            if theirs != -1 and ours != -1:
                os.close(theirs)


def run(command: Sequence[str], timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives of a command, of which this is a copy."""
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as copy:
        try:
            out, err = copy.communicate(timeout=timeout)
        except BaseException:
            copy.kill()
            raise
    return subprocess.CompletedProcess(command, copy.returncode, out, err)


class Kept(subprocess.Popen):
    """A rank of a supervisor that is a copy itself: one of the copies that it made when it began. By the time it starts
    ranks it has threads of torch's that wait for sockets, and copies made then have been seen to end them, or to wait
    for ever for what a thread held. Where none is left, the command is started as ever."""

    ranks: ClassVar[int] = 2  # of the next supervisor
    spares: ClassVar[list[tuple[int, int]]] = []  # process ids, and pipes on which each waits for what to run

    def _execute_child(self, *arguments: Any) -> None:
        start = Start(*arguments[: len(Start._fields)])
        if not self.spares:
            super()._execute_child(*arguments)  # pyright: ignore
            return
        assert start.preexec_fn is None, "a function cannot be sent"
        self.pid, pipe = self.spares.pop(0)
        streams = [own if end == -1 else end for own, end in enumerate(start.theirs)]
        with open(pipe, "wb") as sent:
            pickle.dump((list(start.args), start.cwd, None if start.env is None else dict(start.env), streams), sent)
        self._child_created = True


def spare() -> tuple[int, int]:
    """A copy of this process that waits for what to run. It ends with this process."""
    waits, tells = os.pipe()
    pid = os.fork()
    if pid:
        os.close(waits)
        return pid, tells
    try:
        os.close(tells)
        for _, pipe in Kept.spares:
            os.close(pipe)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with open(waits, "rb") as told:
            command, cwd, environment, streams = pickle.load(told)
        parent = os.getppid()
        modes = (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND)
        opened = [os.open(f"/proc/{parent}/fd/{n}", mode) for n, mode in zip(streams, modes, strict=True)]
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    except BaseException:  # noqa: BLE001 - never wanted, or too late
        os._exit(1)
    become(command, None, cwd, environment, (opened[0], opened[1], opened[2]))
    raise AssertionError("a copy came back")


def become(
    command: list[str],
    first: Callable[[], object] | None,
    cwd: Any,
    environment: Mapping[str, str] | None,
    streams: tuple[int, int, int],
    passed: Sequence[int] = (),
) -> None:
    """Run `command` in this process, a copy, and end. passed: open files that it gets beside its streams."""
    code = 1
    try:
        gc.freeze()  # nothing of the parent's is ended from here
        faulthandler.disable()
        for number, stream in enumerate(streams):
            if stream != -1:
                os.dup2(stream, number)
        for number in [int(name) for name in os.listdir("/proc/self/fd")]:
            if number > 2 and number not in passed:
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(number)
        os.setsid()
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        tempfile.tempdir = None  # found anew, in this environment
        if cwd is not None:
            os.chdir(cwd)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        logging.root.handlers.clear()
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if first is not None:
            first()
        if "MALLOC_MMAP_THRESHOLD_" in os.environ:
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(os.environ["MALLOC_MMAP_THRESHOLD_"]))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        subprocess_handler.Popen = Kept  # what a copy starts are copies, too
        processes.subprocess = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)
        kind, what, *arguments = [word for word in command[1:] if word != "-u"]
        sys.argv = [what, *arguments]
        if what == SUPERVISOR:
            for _ in range(Kept.ranks):
                Kept.spares.append(spare())
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            assert kind == "-c", command
            with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as script:
                script.write(what)
                script.flush()
                runpy.run_path(script.name, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would, whatever it is
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def forking(ranks: int = 2) -> Iterator[None]:
    """Inside, workers of so many ranks begin as copies of this process."""
    # Nothing but this module of what ranks import is needed here, and who is copied has it once for all.
    import wan_core.workers.jobs
    import wan_core.workers.rendezvous  # noqa: F401

    copies = mock.patch.object(processes, "subprocess", SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE))
    with copies, mock.patch.object(Kept, "ranks", ranks):
        yield
