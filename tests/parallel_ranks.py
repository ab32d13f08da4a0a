"""Ranks for tests: processes that join over gloo, import everything once, and then answer one question after another.

A test file asks for a world of some size (`Ranks(size)`), and hands it functions of `parallel_checks` by name with
plain arguments. A check runs on every rank and returns what pickles; an exception of any rank is raised in the test.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _rank(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0",
    }  # fmt: skip
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    torch.set_num_threads(1)
    import parallel_checks

    while (asked := pipe.recv()) is not None:
        name, arguments = asked
        try:
            pipe.send((True, getattr(parallel_checks, name)(**arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Ranks:
    """A world of processes on this machine. `close` it."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in range(size)]
        port = free_port()
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_rank, args=(rank, size, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def ask(self, check: str, **arguments: Any) -> list[Any]:
        """What every rank answers."""
        for pipe in self.pipes:
            pipe.send((check, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(SECONDS):
                raise AssertionError(f"rank {rank} gave no answer to {check} {arguments} in {SECONDS:g} s")
            answers.append(pipe.recv())
        faults = [f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(answers) if not good]
        assert not faults, "\n".join(faults)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
