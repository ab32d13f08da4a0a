"""Ranks for tests: processes that import everything once, join over gloo in worlds of any size up to their number, and
answer one question after another.

A check is a function of `parallel_checks` or a file `parallel_...` beside it, called by name with plain arguments,
one of which is the mesh. It runs on every rank of that mesh and returns what pickles; an exception of any rank is
raised in the test. All ranks of a world leave it before any of them enters another.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120.0
GRACE = 10.0  # for other ranks' answers, after the fault of one
LEAVE = "leave"
CHECKS = ("parallel_checks", "parallel_families", "parallel_loading", "parallel_sparse", "parallel_vae")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, pipe: Connection, trace: str) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch.distributed as dist

    torch.set_num_threads(1)
    import parallel_checks

    modules = [importlib.import_module(name) for name in CHECKS]
    gc.freeze()  # what is imported stays

    stands = open(trace, "w")  # noqa: SIM115 - for as long as this process lives
    faulthandler.register(signal.SIGUSR1, file=stands, all_threads=True)

    def leave() -> None:
        """A world; all of its ranks together, because NCCL waits for all of them."""
        parallel_checks.ranks_of.cache_clear()
        parallel_checks.loaded.cache_clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    checks = {name: check for module in modules for name, check in vars(module).items()}
    while (asked := pipe.recv()) is not None:
        name, arguments, environment = asked
        try:
            if environment is not None:
                os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
            pipe.send((True, leave() if name == LEAVE else checks[name](**arguments)))
        except Exception:  # noqa: BLE001 - whatever a check raises belongs to the test
            pipe.send((False, traceback.format_exc()))
    leave()


class Ranks:
    """So many processes on this machine. `close` them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.start()

    def start(self) -> None:
        context = mp.get_context("forkserver")  # its server imports everything, and every rank begins as a copy of it
        # What several ranks compile with is imported once; not where it may ask a GPU's driver, which no copy can use.
        compiler = [] if torch.cuda.is_available() else ["functorch.compile"]
        context.set_forkserver_preload([*CHECKS, "sentencepiece", *compiler])
        pairs = [context.Pipe() for _ in range(self.most)]
        self.size = 0  # of the world that they form
        self.pipes = [ours for ours, _ in pairs]
        self.traces = [Path(self.folder.name) / f"{rank}.txt" for rank in range(self.most)]
        self.processes = [
            context.Process(target=_rank, args=(rank, theirs, str(trace)), daemon=True)
            for rank, ((_, theirs), trace) in enumerate(zip(pairs, self.traces, strict=True))
        ]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        with mock.patch.dict(os.environ, {"PYTHONPATH": paths}):  # the server knows no other way before Python 3.12
            for process in self.processes:
                process.start()
        for _, theirs in pairs:
            theirs.close()  # so that a rank that dies ends its pipe

    def ask(self, check: str, *, mesh: str, seconds: float = SECONDS, **arguments: Any) -> list[Any]:
        """What every rank of `mesh` answers. Fails with what each of them raised, died of or hangs in; where one gave
        no answer in `seconds`, or in `GRACE` after a fault of another, all are ended; the next question starts anew."""
        if not self.processes:
            self.start()
        size, environment = math.prod(map(int, re.findall(r"\d+", mesh))), None
        if size != self.size:
            self._answers(self.size, (LEAVE, {}, None), SECONDS, f"{LEAVE} a world of {self.size}")
            environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            self.size = size
        asked = check, {"mesh": mesh, **arguments}, environment
        return self._answers(size, asked, seconds, f"{check} {mesh} {arguments}")

    def _answers(self, size: int, asked: tuple, seconds: float, question: str) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        for rank, pipe in enumerate(self.pipes[:size]):
            try:
                pipe.send(asked)
            except OSError:
                answers[rank] = False, self._death(rank)
        until = time.monotonic() + seconds
        while missing := [rank for rank in range(size) if rank not in answers]:
            ready = wait([self.pipes[rank] for rank in missing], max(0.0, until - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in missing if self.pipes[rank] in ready]:
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, OSError):
                    answers[rank] = False, self._death(rank)
                if not answers[rank][0]:  # others may wait for this one
                    until = min(until, time.monotonic() + GRACE)
        faults = [f"rank {rank}: {answer}" for rank, (good, answer) in sorted(answers.items()) if not good]
        faults += [f"rank {rank} gave no answer to {question}. It stands at\n{self._stands(rank)}" for rank in missing]
        if missing or not all(process.is_alive() for process in self.processes):
            self._end()
        assert not faults, "\n".join(faults)
        return [answers[rank][1] for rank in range(size)]

    def _death(self, rank: int) -> str:
        self.processes[rank].join(GRACE)
        return f"it ended, exit code {self.processes[rank].exitcode}"

    def _stands(self, rank: int) -> str:
        """Where every thread of a rank is."""
        pid, trace = self.processes[rank].pid, self.traces[rank]
        if pid is None or not self.processes[rank].is_alive():
            return self._death(rank)
        before = trace.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.1)
            if trace.stat().st_size > before:
                break
        return trace.read_text()[before:]

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(GRACE)
        self.processes, self.size = [], 0

    def close(self) -> None:
        try:
            if self.processes:
                self._answers(self.size, (LEAVE, {}, None), GRACE, LEAVE)
                for pipe in self.pipes:
                    pipe.send(None)
                for process in self.processes:
                    process.join(GRACE)
        finally:
            self._end()
            self.folder.cleanup()
