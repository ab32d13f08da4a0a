"""A rank: one process on one device, `python -m wan_core.workers.worker`, started by torch's elastic launcher.

The rank whose host runs the program that asked for the ranks is rank 0 and the only one that talks to it
(`control.py`). Every request goes from it to all ranks, every rank does the same (`jobs.py`), rank 0 answers.

What holds the ranks together:

- Requests and the flag of interruption travel over a gloo group on the CPU. The flag is agreed on in every step, so
  that all ranks stop at the same one and none waits for another for ever.
- Every rank says twice a second, through the store of the rendezvous, where it is. Rank 0 hands that on, so a rank
  that hangs is found and named by the program.
- A rank that fails alone writes its last words and ends; the launcher ends the others. Where all fail at the same
  request (a bad option, a picture too large for every GPU) they go on with the next one.
- A rank does not outlive who started it: the kernel kills it with the supervisor, and rank 0 ends when the control
  channel does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from wan_core.checkpoint.safetensors_file import safetensors_pieces
from wan_core.config import OptionError, UserError
from wan_core.workers.control import Channel, ChannelClosed, ChannelError, connect, unpack_tensors
from wan_core.workers.supervisor import CONTROL

PULSE = 0.5  # seconds between two signs of life
GRACE = 3.0  # seconds after which a rank that failed takes itself to be the only one
IDLE = timedelta(days=365)  # how long a request may be waited for
MARGIN = 60.0  # seconds that collectives wait longer than the program, which knows more to say
READ = 2**20  # bytes read from a file that count as progress
ORPHAN, FAILED = 3, 1  # exit codes


class Interrupted(Exception):
    """The user does not want the rest. Raised on all ranks in the same step."""


# ---------------------------------------------------------------------------------------------------------------- death


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; where it cannot (not Linux), a thread sees to it."""
    parent = os.getppid()
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(ORPHAN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PULSE)
        os._exit(ORPHAN)

    threading.Thread(target=watch, daemon=True).start()


def bytes_read() -> int:
    """What this process has had from disks so far, mapped files included; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "read_bytes")))


def reason_of(fault: BaseException) -> str:
    """What kind of fault it is: user, memory, disk, peer (another rank is gone or late) or fault."""
    words = str(fault)
    if isinstance(fault, UserError):
        return "user"
    out = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "can't start new thread", "out of memory")
    if isinstance(fault, (MemoryError, torch.OutOfMemoryError)) or any(word in words.lower() for word in out):
        return "memory"
    if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return "disk"
    lost = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "timed out", "Timed out")
    if isinstance(fault, dist.DistError) or (isinstance(fault, RuntimeError) and any(word in words for word in lost)):
        return "peer"
    return "fault"


# ----------------------------------------------------------------------------------------------------------------- rank


class Rank:
    """Who this process is among the ranks, where it stands, and what it shares with the others."""

    def __init__(self, device: torch.device, control: Mapping[str, Any] | None, start_timeout: float) -> None:
        wait = timedelta(seconds=start_timeout)
        self.device = device
        self.host = socket.gethostname()
        self.store, given, self.size = next(rendezvous("env://", timeout=wait))
        base, step_timeout = self._find_leader(given, control)
        self.patience = timedelta(seconds=step_timeout + MARGIN)  # of one exchange
        self.on_host = int(os.environ["LOCAL_WORLD_SIZE"])
        self.rank = (given - base) % self.size  # the program's host first, hosts stay together
        if self.rank == 0:
            assert control is not None
            self.channel: Channel | None = connect(control["port"], bytes.fromhex(control["key"]), start_timeout)
        else:
            self.channel = None
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("world", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.patience,
            device_id=device if device.type == "cuda" else None,
        )
        self.group: Any = dist.new_group(backend="gloo", timeout=IDLE)
        self.request = 0  # number of the one in work
        self.interrupt = -1  # number of the one that is to stop
        self._status: dict[str, Any] = {"phase": "idle", "step": 0, "of": 0, "count": 0}
        self.where = {"rank": self.rank, "host": self.host, "pid": os.getpid(), "device": str(device)}
        self._finish_last_request: Callable[[], None] | None = None
        threading.Thread(target=self._pulse, daemon=True).start()

    def _find_leader(self, given: int, control: Mapping[str, Any] | None) -> tuple[int, float]:
        """The launcher's rank of the first one on the program's host, and the program's patience in seconds."""
        if control is not None and os.environ["LOCAL_RANK"] == "0":
            mine = json.dumps({"rank": given, "step_timeout": control["step_timeout"]})
            if self.store.compare_set("leader", "", mine).decode() != mine:
                raise OptionError("two programs ask for the same ranks: give each rendezvous a name of its own")
        try:
            leader = json.loads(self.store.get("leader"))
        except dist.DistStoreError as fault:
            raise OptionError(
                "no program asked for these ranks: start `generate --gpus` with the same rendezvous on one of the hosts"
            ) from fault
        return leader["rank"], leader["step_timeout"]

    # ---------------------------------------------------------------------------------------------------- where it is

    def beat(self, phase: str, step: int = 0, of: int = 0) -> None:
        """Say that this rank got somewhere."""
        self._status = {"phase": phase, "step": step, "of": of, "count": self._status["count"] + 1}

    @property
    def words(self) -> str:
        """`denoise, step 3 of 20`."""
        status = self._status
        return f"{status['phase']}, step {status['step']} of {status['of']}" if status["of"] else status["phase"]

    def _pulse(self) -> None:
        """Runs beside everything. It has a connection of its own to the store, which serves one caller at a time."""
        try:
            store = PrefixStore("pulse", next(rendezvous("env://", timeout=timedelta(seconds=MARGIN)))[0])
            seen: dict[int, tuple[Any, float, float]] = {}  # rank -> what it said, when it did, when it got somewhere
            number = read = reads = 0
            while True:
                with contextlib.suppress(MemoryError):  # whoever needs the memory says so
                    status, found = self._status, bytes_read()
                    if status["phase"] == "load" and found > read + READ:  # a slow disk is no hang
                        read, reads = found, reads + 1
                    said = {**self.where, **status, "count": status["count"] + reads, "pulse": number}
                    store.set(str(self.rank), json.dumps(said))
                    number += 1
                    if self.channel is not None:
                        self.channel.send({"kind": "status", "ranks": self._statuses(store, seen)})
                time.sleep(PULSE)
        except (RuntimeError, OSError):
            os._exit(ORPHAN)  # the store or the program is gone

    def _statuses(self, store: Store, seen: dict[int, tuple[Any, float, float]]) -> list[dict[str, Any]]:
        """Of every rank that was heard of, with the seconds since it said something and since it got somewhere; by
        this host's clock."""
        now = time.monotonic()
        for rank in range(self.size):
            if store.check([str(rank)]):
                said = json.loads(store.get(str(rank)))
                before, heard, moved = seen.get(rank, (None, now, now))
                if before is None or said["pulse"] != before["pulse"]:
                    heard = now
                if before is None or said["count"] != before["count"]:
                    moved = now
                seen[rank] = said, heard, moved
        return [
            {**said, "silent": round(now - heard, 2), "still": round(now - moved, 2)}
            for said, heard, moved in seen.values()
        ]

    # ------------------------------------------------------------------------------------------------- what is shared

    def share(self, header: Mapping[str, Any] | None, tensors: Mapping[str, Tensor] | None) -> tuple[Any, Any]:
        """Rank 0's request on all ranks: JSON and safetensors, no pickle."""
        if self.rank == 0:
            text = json.dumps(header).encode()
            body = b"".join(safetensors_pieces(tensors, {})) if tensors else b""
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
        return json.loads(raw[:middle]), unpack_tensors(raw[middle:]) if lengths[1] else {}

    def agree(self) -> None:
        """All ranks, at the same place: raise Interrupted on all of them if rank 0 was told to stop."""
        flag = torch.tensor([self.rank == 0 and self.interrupt == self.request], dtype=torch.uint8)
        dist.broadcast(flag, 0, group=self.group)
        if flag.item():
            raise Interrupted

    def tell(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """To the program; other ranks say nothing."""
        if self.channel is not None:
            self.channel.send({**header, "number": self.request}, tensors)

    def all_failed(self, failed: bool) -> bool:
        """Every rank, at the end of a request: whether all failed. One that fails waits for the others as long as
        `GRACE`, and those that succeed do not wait."""
        self.store.set(f"end/{self.request}/{self.rank}", "failed" if failed else "done")
        if self.request > 1:
            self.store.delete_key(f"end/{self.request - 2}/{self.rank}")
        if not failed:
            return False
        keys = [f"end/{self.request}/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + GRACE
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                self.store.set(keys[self.rank], "gone")  # or those that fail because of that took it for their own
                return False
            time.sleep(0.02)
        return all(self.store.get(key) == b"failed" for key in keys)

    def last_words(self, fault: BaseException) -> dict[str, Any]:
        """What the program is told about a fault on this rank."""
        return {
            **self.where,
            "where": self.words,
            "reason": reason_of(fault),
            "type": type(fault).__name__,
            "text": str(fault) or type(fault).__name__,
        }

    def fail(self, fault: BaseException) -> None:
        """Leave the last words where the launcher looks for them, and end. Without cleaning up: a collective that
        never ends would be waited for."""
        leave_words(self.last_words(fault))
        traceback.print_exception(fault)
        sys.stderr.flush()
        os._exit(FAILED)


def leave_words(said: Mapping[str, Any]) -> None:
    """Into the file that the elastic launcher reads; see `supervisor._failure`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": traceback.format_exc()}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": said["text"], "extraInfo": extra, "wancore": said}}, file)


# -------------------------------------------------------------------------------------------------------------- serving


def listen(channel: Channel, rank: Rank, inbox: queue.SimpleQueue[Any]) -> None:
    """Rank 0's ear, beside whatever runs. When the program is gone, so is this rank."""
    try:
        while True:
            header, tensors = channel.receive()
            if header["op"] == "interrupt":
                rank.interrupt = header["number"]
            elif header["op"] == "ping":
                channel.send({"kind": "pong", "number": header["number"]})
            else:
                inbox.put((header, tensors))
    except (ChannelError, KeyError):
        os._exit(ORPHAN)


def serve(rank: Rank) -> None:
    """Do what is asked until told to shut down."""
    from wan_core.workers.jobs import Jobs

    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    jobs = Jobs(rank)
    gc.freeze()  # what is imported stays: no collection need look at it, of which every request has one
    dist.barrier(group=rank.group)  # everybody is here
    if rank.channel is not None:
        threading.Thread(target=listen, args=(rank.channel, rank, inbox), daemon=True).start()
        rank.tell({"kind": "ready", "ranks": rank.size, "torch": torch.__version__})
    while True:
        rank.beat("idle")
        header, tensors = rank.share(*inbox.get()) if rank.rank == 0 else rank.share(None, None)
        rank.request = header["number"]
        if header["op"] == "shutdown":
            return
        fault = _answer(rank, jobs, header, tensors)
        del header, tensors
        gc.collect()  # cycles would hold a GPU's memory until some later collection
        if fault is not None:
            if not rank.all_failed(True):
                rank.fail(fault)
            rank.tell({"kind": "error", **rank.last_words(fault)})
            fault = fault.with_traceback(None)  # which holds the tensors of what failed
            del fault
            jobs.clean()


def _answer(rank: Rank, jobs: Any, header: dict[str, Any], tensors: dict[str, Tensor]) -> BaseException | None:
    """Do one request. Returns what went wrong, if that is not the user's will."""
    try:
        result, given = jobs.run(header, tensors)
        rank.all_failed(False)
        rank.tell({"kind": "result", **result}, given)
    except Interrupted:
        rank.tell({"kind": "interrupted"})
    except ChannelClosed:
        os._exit(ORPHAN)
    except Exception as fault:  # noqa: BLE001  whatever it is: the program must hear of it, and the others not wait
        return fault
    return None


def choose_devices(text: str | None) -> torch.device:
    """The device of this rank, from a list for its host; None takes the GPU of its number, or the CPU."""
    local = int(os.environ["LOCAL_RANK"])
    if text is None:
        count = torch.cuda.device_count()
        names = [f"cuda:{i}" for i in range(count)] if count else ["cpu"] * (local + 1)
    else:
        names = text.split(",")
    if local >= len(names):
        raise OptionError(f"rank {local} of this host has no device: {len(names)} named or found")
    device = torch.device(names[local])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m wan_core.workers.worker",
        description="One rank. WanCore starts it by itself; by hand, under torchrun, only on further hosts.",
    )
    parser.add_argument("--devices", help="of this host's ranks: cuda:0,cuda:1 or cpu,cpu (default: GPUs in order)")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds to wait for the other ranks")
    options = parser.parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        parser.error("started outside of torch's launcher: use `generate --gpus`, or torchrun on further hosts")
    die_with_parent()
    text = os.environ.pop(CONTROL, None)  # the key is not for children of this process
    control = None if text is None else json.loads(text)
    devices, patience = options.devices, options.start_timeout
    if control is not None:
        devices, patience = ",".join(control["devices"]), control["start_timeout"]
    phase = "start"
    try:
        rank = Rank(choose_devices(devices), control, patience)
    except (OSError, RuntimeError, UserError) as fault:
        where = {"rank": int(os.environ["RANK"]), "host": socket.gethostname(), "pid": os.getpid(), "where": phase}
        leave_words({**where, "reason": reason_of(fault), "type": type(fault).__name__, "text": str(fault)})
        traceback.print_exc()
        return FAILED
    serve(rank)
    dist.barrier(group=rank.group)
    sys.stdout.flush()
    os._exit(0)  # destroying process groups can wait for kernels that never end


if __name__ == "__main__":
    sys.exit(main())
