"""Ranks for tests: processes that import everything once, join over gloo in worlds of any size up to their number, and
answer one question after another.

A check is a function of `parallel_checks`, called by name with plain arguments, one of which is the mesh. It runs on
every rank of that mesh and returns what pickles; an exception of any rank is raised in the test.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _rank(rank: int, pipe: Connection) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    import parallel_checks

    while (asked := pipe.recv()) is not None:
        name, arguments, environment = asked
        try:
            if environment is not None:  # another world
                if dist.is_initialized():
                    dist.destroy_process_group()
                parallel_checks.ranks_of.cache_clear()
                os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
            pipe.send((True, getattr(parallel_checks, name)(**arguments)))
        except Exception:  # noqa: BLE001 - whatever a check raises belongs to the test
            pipe.send((False, traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """So many processes on this machine. `close` them."""

    def __init__(self, most: int) -> None:
        context = mp.get_context("forkserver")  # its server imports everything, and every rank begins as a copy of it
        context.set_forkserver_preload(["parallel_checks"])
        pairs = [context.Pipe() for _ in range(most)]
        self.size = 0  # of the world that they form
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_rank, args=(rank, theirs), daemon=True) for rank, (_, theirs) in enumerate(pairs)
        ]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        with mock.patch.dict(os.environ, {"PYTHONPATH": paths}):  # the server knows no other way before Python 3.12
            for process in self.processes:
                process.start()

    def ask(self, check: str, *, mesh: str, **arguments: Any) -> list[Any]:
        """What every rank of `mesh` answers."""
        cfg, ring, ulysses = (int(count.rstrip("b")) for count in mesh.split("x"))
        size, environment = cfg * ring * ulysses, None
        if size != self.size:
            environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            self.size = size
        for pipe in self.pipes[:size]:
            pipe.send((check, {"mesh": mesh, **arguments}, environment))
        answers = []
        for rank, pipe in enumerate(self.pipes[:size]):
            assert pipe.poll(SECONDS), f"rank {rank} gave no answer to {check} {mesh} {arguments} in {SECONDS:g} s"
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
