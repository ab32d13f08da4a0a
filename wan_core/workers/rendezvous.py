"""The rendezvous of the ranks: a torch store on one host, at an address that every supervisor is told.

torch's own rendezvous (`c10d`) listens on every interface of the host and unpickles what it receives, so anyone who
reaches its port can run code in the supervisor. Ours needs neither: the ranks are known beforehand and share only the
store. One host has it on the loopback interface; of several hosts that Ray found, the first has it
(`wan_core.cluster`), on the interface that Ray uses. Nothing that a store holds is unpickled.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from wan_core.workers.control import LOOPBACK

BACKEND = "wancore"


@dataclass(frozen=True)
class Meeting:
    """Where the supervisors of one run meet. host, port: of the store. descriptor: an open socket that listens there,
    on the host that has the store. node, nodes: the number of this supervisor, and how many there are."""

    host: str
    port: int
    descriptor: int | None = None
    node: int = 0
    nodes: int = 1


class KnownHosts(RendezvousHandler):
    """For one launcher. That of node 0 has the store."""

    def __init__(self, run_id: str, timeout: timedelta, meeting: Meeting | None) -> None:
        self.run_id = run_id
        if meeting is None:
            listening = socket.create_server((LOOPBACK, 0), backlog=128)
            port = listening.getsockname()[1]
            meeting = Meeting(LOOPBACK, port, listening.detach())
        self.meeting = meeting
        # the store's own socket would listen on every interface
        listens = {} if meeting.descriptor is None else {"is_master": True, "master_listen_fd": meeting.descriptor}
        self.store = TCPStore(meeting.host, meeting.port, wait_for_workers=False, timeout=timeout, **listens)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(self.meeting.host, self.meeting.port)
        store = PrefixStore(f"agent/{self.run_id}", self.store)
        return RendezvousInfo(store, self.meeting.node, self.meeting.nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other launcher can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


def register(run_id: str, timeout: float, meeting: Meeting | None) -> str:
    """Register the rendezvous `run_id` with torch's launcher; `meeting` None is one host alone. Returns the name of its
    backend: torch's own (`c10d`) if torch is too old for a store on an open socket and one host is alone."""
    try:
        made = KnownHosts(run_id, timedelta(seconds=timeout), meeting)
    except NotImplementedError:
        if meeting is not None:
            raise
        return "c10d"

    def create(_: RendezvousParameters) -> RendezvousHandler:
        return made

    rendezvous_handler_registry.register(BACKEND, create)
    return BACKEND
