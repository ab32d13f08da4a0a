"""A rank: who this process is among the worker processes, and what it shares with the others.

A thread of each rank publishes where the rank is: twice a second it writes phase, step and a counter into the
rendezvous store. Rank 0 sends the entries of all ranks to the program, which so finds and names a rank that hangs. A
rank that fails alone publishes its failure under `FAILED`, and every other rank ends with it: the launcher ends the
ranks of one host only, and NCCL does not notice a peer that has ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from wan_core.parallel.mesh import Mesh
from wan_core.sampling.denoise import BlockChecks
from wan_core.sampling.plan import Plan
from wan_core.workers.control import Channel, ChannelError, connect, pack_tensors, unpack_tensors
from wan_core.workers.faults import EXIT_FAILED, EXIT_ORPHANED, Interrupted, describe_fault, place, write_error_file
from wan_core.workers.wire import pack

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
STORE_TIMEOUT = timedelta(seconds=60)
READ_BYTES = 2**20  # bytes read from files that count as progress while loading
PREFIX, FAILED = "heartbeat", "failed"  # of the keys in the store; the key of the first failure


def bytes_read() -> int:
    """Bytes that this process has read from files so far, mapped files included; 0 where /proc does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "read_bytes")))


def publish_failure(store: Store, failure: Mapping[str, Any]) -> None:
    """Tell all other ranks, and wait until they have had time to see it: the store may end with this process."""
    PrefixStore(PREFIX, store).compare_set(FAILED, "", json.dumps(failure))  # the first failure is the cause
    time.sleep(2 * HEARTBEAT_SECONDS)


@dataclass(frozen=True)
class Seen:
    """The last entry of a rank, and when (by this host's clock) its heartbeat and its progress last changed."""

    entry: dict[str, Any]
    heartbeat: float
    progress: float


class Heartbeat:
    """identity: rank, host, pid and device of this rank. channel: to the program, on rank 0."""

    def __init__(self, identity: Mapping[str, Any], size: int, channel: Channel | None) -> None:
        self.identity, self.size, self.channel = identity, size, channel
        self.status: dict[str, Any] = {"phase": "idle", "step": 0, "of": 0, "count": 0}
        self._seen: dict[int, Seen] = {}
        self._number = self._bytes = self._reads = 0

    def start(self) -> None:
        threading.Thread(target=self.run, daemon=True).start()

    def progress(self, phase: str, step: int = 0, of: int = 0) -> None:
        self.status = {"phase": phase, "step": step, "of": of, "count": self.status["count"] + 1}

    @property
    def where(self) -> str:
        """`denoise, step 3 of 20`."""
        return place(self.status)

    def run(self) -> None:
        """The thread. Ends the process when the program or the store is gone, or when another rank has failed."""
        try:
            # A connection of its own: one connection serves one call at a time, and other calls wait for minutes.
            store = PrefixStore(PREFIX, next(rendezvous("env://", timeout=STORE_TIMEOUT))[0])
            while True:
                with contextlib.suppress(MemoryError):  # the thread that needs the memory reports it
                    self._publish(store)
                    self._end_if_another_failed(store)
                    if self.channel is not None:
                        self.channel.send({"kind": "status", "ranks": self._read_all(store)})
                time.sleep(HEARTBEAT_SECONDS)
        except ChannelError:
            os._exit(EXIT_ORPHANED)
        except (RuntimeError, OSError) as fault:
            lost = ConnectionError(f"the rendezvous store is not available any more: {fault}")
            write_error_file({**describe_fault(lost, self.identity, self.where), "reason": "peer"})
            os._exit(EXIT_ORPHANED)

    def _publish(self, store: Store) -> None:
        status, found = self.status, bytes_read()
        if status["phase"] == "load" and found > self._bytes + READ_BYTES:  # reading slowly is progress too
            self._bytes, self._reads = found, self._reads + 1
        entry = {**self.identity, **status, "count": status["count"] + self._reads, "heartbeat": self._number}
        store.set(str(self.identity["rank"]), json.dumps(entry))
        self._number += 1

    def _end_if_another_failed(self, store: Store) -> None:
        failure = read_entry(store, FAILED)
        if failure is not None and failure["rank"] != self.identity["rank"]:
            write_error_file(failure)
            print(f"rank {failure['rank']} failed: {failure['text']}", file=sys.stderr, flush=True)
            os._exit(EXIT_FAILED)

    def _read_all(self, store: Store) -> list[dict[str, Any]]:
        """The last entry of each rank that published one, with seconds since its last heartbeat and last progress."""
        now = time.monotonic()
        for rank in range(self.size):
            entry = read_entry(store, str(rank))
            if entry is not None:
                last = self._seen.get(rank)
                heartbeat = last.heartbeat if last and entry["heartbeat"] == last.entry["heartbeat"] else now
                progress = last.progress if last and entry["count"] == last.entry["count"] else now
                self._seen[rank] = Seen(entry, heartbeat, progress)
        return [
            seen.entry
            | {"since_heartbeat": round(now - seen.heartbeat, 2), "since_progress": round(now - seen.progress, 2)}
            for seen in self._seen.values()
        ]


def read_entry(store: Store, key: str) -> dict[str, Any] | None:
    """The JSON object under `key`; None if there is none."""
    return json.loads(store.get(key)) if store.check([key]) else None


ALL_FAILED_SECONDS = 3.0  # a rank that failed waits so long for the other ranks to fail at the same request
REQUEST_TIMEOUT = timedelta(days=365)  # between two requests
BLOCKS_BETWEEN_CHECKS = 4  # an agreement takes 0.2 ms on one host
EXCHANGE_MARGIN = 60.0  # seconds: the program, which can name the rank that hangs, gives up before an exchange does


class Rank:
    """The process groups of this rank, its connection to the program (rank 0), and its heartbeat."""

    def __init__(self, device: torch.device, control: Mapping[str, Any]) -> None:
        """control: of `SupervisorOptions`."""
        wait = timedelta(seconds=control["start_timeout"])
        self.device = device
        self.store, self.rank, self.size = next(rendezvous("env://", timeout=wait))
        self.timeout = timedelta(seconds=control["step_timeout"] + EXCHANGE_MARGIN)  # of one exchange
        self.on_host = int(os.environ["LOCAL_WORLD_SIZE"])
        self.channel: Channel | None = None
        if self.rank == 0:
            self.channel = connect(control["port"], bytes.fromhex(control["key"]), control["start_timeout"])
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("world", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            device_id=device if device.type == "cuda" else None,
        )
        self.group: Any = dist.new_group(backend="gloo", timeout=REQUEST_TIMEOUT)
        self.request = 0  # number of the current request
        self.interrupted = -1  # number of the request that the program wants stopped
        self.identity = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "device": str(device)}
        self.heartbeat = Heartbeat(self.identity, self.size, self.channel)
        self.heartbeat.start()

    def progress(self, phase: str, step: int = 0, of: int = 0) -> None:
        self.heartbeat.progress(phase, step, of)

    def send(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a frame to the program; does nothing on ranks other than 0."""
        if self.channel is not None:
            self.channel.send({**header, "number": self.request}, tensors)

    def event(self, name: str, /, **values: Any) -> None:
        """Have the program call its handler of this event with these values."""
        tensors: dict[str, Tensor] = {}
        self.send({"kind": "event", "name": name, **pack(values, tensors, name)}, tensors)

    def share(self, header: Mapping[str, Any] | None, tensors: Mapping[str, Tensor] | None) -> tuple[Any, Any]:
        """Rank 0's request on all ranks, as JSON and safetensors without pickle."""
        if self.rank == 0:
            text = json.dumps(header).encode()
            body = pack_tensors(tensors or {})
            lengths = torch.tensor([len(text), len(body)])
            data = torch.frombuffer(bytearray(text + body), dtype=torch.uint8)
        else:
            lengths = torch.zeros(2, dtype=torch.long)
        dist.broadcast(lengths, 0, group=self.group)
        if self.rank != 0:
            data = torch.empty(int(lengths.sum()), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.group)
        if self.rank == 0:
            return header, tensors
        raw, middle = bytearray(data.numpy()), int(lengths[0])
        return json.loads(raw[:middle]), unpack_tensors(raw[middle:])

    def raise_if_interrupted(self) -> None:
        """Raise Interrupted on all ranks if the program stopped the request. All ranks call it at the same place."""
        flag = torch.tensor([self.rank == 0 and self.interrupted == self.request], dtype=torch.uint8)
        dist.broadcast(flag, 0, group=self.group)
        if flag.item():
            raise Interrupted

    def all_failed(self, failed: bool) -> bool:
        """Whether all ranks failed at this request. Every rank calls it at the end of a request. One that failed waits
        `ALL_FAILED_SECONDS` for the others; one that succeeded does not wait."""
        self.store.set(f"end/{self.request}/{self.rank}", "failed" if failed else "done")
        if self.request > 1:
            self.store.delete_key(f"end/{self.request - 2}/{self.rank}")
        if not failed:
            return False
        keys = [f"end/{self.request}/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + ALL_FAILED_SECONDS
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                # Another rank that fails because this one ends must not count this failure as one of all.
                self.store.set(keys[self.rank], "gone")
                return False
            time.sleep(0.02)
        return all(self.store.get(key) == b"failed" for key in keys)

    def describe(self, fault: BaseException) -> dict[str, Any]:
        """A fault on this rank, for the program."""
        return describe_fault(fault, self.identity, self.heartbeat.where)

    def fail(self, fault: BaseException) -> NoReturn:
        """Report the fault to the launcher and to the other ranks, and end this process. No process group is
        destroyed: that would wait for exchanges that never end."""
        failure = self.describe(fault)
        write_error_file(failure)
        traceback.print_exception(fault)
        sys.stderr.flush()
        try:
            publish_failure(self.store, failure)
        finally:  # also if the store is gone
            os._exit(EXIT_FAILED)


def agreements(plan: Plan, mesh: Mesh, blocks: int) -> tuple[int, ...]:
    """How often all ranks of `mesh` agree within each step of `plan`, of models of so many blocks, before they agree at
    its end: after every `BLOCKS_BETWEEN_CHECKS` blocks of the rank that runs most of them, never where ranks run
    different blocks or steps at a time."""
    if mesh.layers > 1 or mesh.time > 1:
        return (0,) * len(plan.steps)
    counts = [step.runs * (min(1, step.computed) if mesh.cfg > 1 else step.computed) for step in plan.steps]
    return tuple(count * blocks // BLOCKS_BETWEEN_CHECKS for count in counts)


class BetweenBlocks(BlockChecks):
    """All ranks stop at the same block: they agree whether to as often as `agreements` says, and at the end of a step.

    An agreement takes all ranks, and ranks may run different numbers of blocks in a step: those that split guidance
    where one branch is skipped or is none, all of them where a batch needs fewer than the plan allows. What a rank has
    not asked after its blocks it asks before it exchanges velocities, or at the end of the step.
    """

    def __init__(self, rank: Rank, due: Sequence[int]) -> None:
        """due: `agreements` of the plan, which may be walked several times."""
        super().__init__()
        self.rank, self.due = rank, due
        self.step = self.blocks = self.agreed = 0  # blocks and agreements in this step

    def after_block(self) -> None:
        """Raise Interrupted on all ranks if the program stopped the request."""
        self.blocks += 1
        if self.blocks % BLOCKS_BETWEEN_CHECKS == 0 and self.agreed < self.due[self.step]:
            self._agree()

    def skip_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.rank.raise_if_interrupted()

    def before_exchange(self) -> None:
        while self.agreed < self.due[self.step]:
            self._agree()

    def end_step(self) -> None:
        """Raise Interrupted on all ranks if the program stopped the request; called at the end of every step."""
        self.before_exchange()
        self.step, self.blocks, self.agreed = (self.step + 1) % len(self.due), 0, 0
        self.rank.raise_if_interrupted()

    def _agree(self) -> None:
        self.agreed += 1
        self.rank.raise_if_interrupted()
