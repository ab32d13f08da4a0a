"""The thread of each rank that publishes where the rank is, and reads what the other ranks publish.

Twice a second a rank writes its phase, its step and a counter into the rendezvous store. Rank 0 sends the entries of
all ranks to the program, which so finds and names a rank that hangs. A rank that fails alone publishes its failure
under `FAILED`, and every other rank ends with it: the launcher ends the ranks of one host only, and NCCL does not
notice a peer that has ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from wan_core.workers.control import Channel, ChannelError
from wan_core.workers.faults import EXIT_FAILED, EXIT_ORPHANED, describe_fault, place, write_error_file

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
STORE_TIMEOUT = timedelta(seconds=60)
READ_BYTES = 2**20  # bytes read from files that count as progress while loading
PREFIX, FAILED = "heartbeat", "failed"  # of the keys in the store; the key of the first failure
IDENTITY: dict[str, type] = {"rank": int, "host": str, "pid": int, "device": str}
ENTRY: dict[str, type] = IDENTITY | {"phase": str, "step": int, "of": int, "count": int, "heartbeat": int}
FAILURE: dict[str, type] = IDENTITY | {"where": str, "reason": str, "type": str, "text": str}


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
        self._unreadable: set[str] = set()  # keys that were logged
        self._number = self._bytes = self._reads = 0

    def start(self) -> None:
        threading.Thread(target=self.run, daemon=True).start()

    def progress(self, phase: str, step: int = 0, of: int = 0) -> None:
        """The rank has reached this step of this phase."""
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
        failure = self._read(store, FAILED, FAILURE)
        if failure is not None and failure["rank"] != self.identity["rank"]:
            write_error_file(failure)
            print(f"rank {failure['rank']} failed: {failure['text']}", file=sys.stderr, flush=True)
            os._exit(EXIT_FAILED)

    def _read_all(self, store: Store) -> list[dict[str, Any]]:
        """The last entry of each rank that has published one, with the seconds since its last heartbeat and since its
        last progress."""
        now = time.monotonic()
        for rank in range(self.size):
            entry = self._read(store, str(rank), ENTRY)
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

    def _read(self, store: Store, key: str, fields: Mapping[str, type]) -> dict[str, Any] | None:
        """The JSON object under `key`. None if there is none, or one that cannot be read, which is logged once."""
        if not store.check([key]):
            return None
        text = store.get(key)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in fields.items()):
            return found
        if key not in self._unreadable:
            self._unreadable.add(key)
            log.warning("the entry %r of the rendezvous store cannot be read and is ignored: %.100r", key, text)
        return None
