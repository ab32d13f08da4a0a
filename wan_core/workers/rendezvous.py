"""The rendezvous of the ranks of one host: a torch store on the loopback interface.

torch's own rendezvous (`c10d`) listens on every interface of the host and unpickles what it receives, so anyone who
reaches its port can run code in the supervisor. One host needs neither: its ranks are known beforehand and share only
the store. Several hosts have to use torch's (docs/parallel.md says on which networks).
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "wancore-loopback"
LOOPBACK = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """For one launcher, which hosts the store."""

    def __init__(self, run_id: str, timeout: timedelta) -> None:
        self.run_id = run_id
        listening = socket.create_server((LOOPBACK, 0), backlog=128)
        self.port: int = listening.getsockname()[1]
        self.store = TCPStore(
            LOOPBACK,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),  # the store's own socket would listen on every interface
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store as well."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(LOOPBACK, self.port)
        return RendezvousInfo(PrefixStore(f"agent/{self.run_id}", self.store), 0, 1, where)

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


def register(run_id: str, timeout: float) -> str:
    """Register the rendezvous `run_id` with torch's launcher. Returns the name of its backend: torch's own (`c10d`) if
    torch is too old for a store on an open socket."""
    try:
        made = LoopbackRendezvous(run_id, timedelta(seconds=timeout))
    except NotImplementedError:
        return "c10d"

    def create(_: RendezvousParameters) -> RendezvousHandler:
        return made

    rendezvous_handler_registry.register(BACKEND, create)
    return BACKEND
