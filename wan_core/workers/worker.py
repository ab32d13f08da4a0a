"""A worker process: one rank on one device, `python -m wan_core.workers.worker`, started by torch's elastic launcher.

Rank 0 is the only one that talks to the program (`control.py`). It hands every request to
all ranks over a gloo group, all do the same work (`jobs.py`), and rank 0 sends the result. If one rank fails alone, it
reports why and ends, and so do all others. If all fail at the same request (a bad option, a video too large for every
GPU), they stay alive for the next. No rank outlives the program: docs/parallel.md, "Processes".
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.config import UserError
from wan_core.workers.control import Channel, ChannelClosed, ChannelError
from wan_core.workers.faults import EXIT_FAILED, EXIT_ORPHANED, Interrupted, describe_fault, write_error_file
from wan_core.workers.rank import Rank
from wan_core.workers.supervisor import CONTROL

PARENT_CHECK_SECONDS = 0.5
Inbox = queue.SimpleQueue[tuple[dict[str, Any], dict[str, Tensor]]]


def receive_requests(channel: Channel, rank: Rank, inbox: Inbox) -> None:
    """A thread of rank 0. Ends the process when the program is gone."""
    try:
        while True:
            header, tensors = channel.receive()
            if header["op"] == "interrupt":
                rank.interrupted = header["number"]
            else:
                inbox.put((header, tensors))
    except (ChannelError, KeyError):
        os._exit(EXIT_ORPHANED)


def serve(rank: Rank) -> None:
    from wan_core.workers.jobs import Jobs

    inbox: Inbox = queue.SimpleQueue()
    jobs = Jobs(rank)
    gc.freeze()  # imported objects stay: the collection after every request need not look at them
    dist.barrier(group=rank.group)  # all ranks are ready
    if rank.channel is not None:
        threading.Thread(target=receive_requests, args=(rank.channel, rank, inbox), daemon=True).start()
        rank.send({"kind": "ready", "ranks": rank.size, "torch": torch.__version__})
    while True:
        rank.progress("idle")
        header, tensors = rank.share(*inbox.get()) if rank.rank == 0 else rank.share(None, None)
        rank.request = header["number"]
        if header["op"] == "shutdown":
            return
        fault = answer(rank, jobs, header, tensors)
        del header, tensors
        gc.collect()  # reference cycles would hold GPU memory until a later collection
        if fault is not None:
            if not rank.all_failed(True):
                rank.fail(fault)
            rank.send({"kind": "error", **rank.describe(fault)})
            fault = fault.with_traceback(None)  # its frames hold the tensors of the failed request
            del fault
            jobs.clean()


def answer(rank: Rank, jobs: Any, header: dict[str, Any], tensors: dict[str, Tensor]) -> Exception | None:
    """Run one request and send its result. Returns the fault if it failed."""
    try:
        result, given = jobs.run(header, tensors)
        rank.all_failed(False)
        rank.send({"kind": "result", **result}, given)
    except Interrupted:
        rank.send({"kind": "interrupted"})
    except ChannelClosed:
        os._exit(EXIT_ORPHANED)
    except Exception as fault:  # noqa: BLE001  not swallowed: `serve` reports it to the program, whatever it is
        return fault
    return None


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, and check it in a thread for systems other than Linux."""
    parent = os.getppid()
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(EXIT_ORPHANED)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


def choose_device(devices: Sequence[str]) -> torch.device:
    """The device of this rank, of those of its host."""
    device = torch.device(devices[int(os.environ["LOCAL_RANK"])])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def main() -> int:
    end_with_parent()
    control = json.loads(os.environ.pop(CONTROL))  # the key is not for child processes
    try:
        rank = Rank(choose_device(control["devices"]), control)
    except (OSError, RuntimeError, UserError) as fault:
        identity = {"rank": int(os.environ["RANK"]), "host": socket.gethostname(), "pid": os.getpid()}
        write_error_file(describe_fault(fault, identity, "start"))
        traceback.print_exc()
        return EXIT_FAILED
    serve(rank)
    dist.barrier(group=rank.group)
    sys.stdout.flush()
    os._exit(0)  # destroying process groups can wait for kernels that never end


if __name__ == "__main__":
    sys.exit(main())
