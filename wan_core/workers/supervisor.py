"""Starts the ranks of one host with torch's elastic launcher and says how they ended.

`python -m wan_core.workers.supervisor`, started by `launcher.py`. It reads one line of JSON from its standard input,
`Orders`, and writes one to its standard output when the ranks have ended: {"failures": [...]} or {"error": "..."}, both
absent if all went well. Its standard input stays open as long as the program that started it lives: when it ends, this
process ends, and the kernel ends the ranks with it (see `worker.die_with_parent`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

CONTROL = "WANCORE_CONTROL"  # the environment variable that tells the ranks of this host what they need to know
_TAIL = 2000  # characters of a rank's last words


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a supervisor is told. `key`: of the control channel, hex. `rendezvous`: HOST:PORT that several hosts agreed
    on, or None for this host alone."""

    key: str
    port: int
    devices: tuple[str, ...]
    run_id: str
    log_dir: str
    start_timeout: float
    step_timeout: float
    nodes: int = 1
    rendezvous: str | None = None

    def control(self) -> str:
        """For the ranks, as `CONTROL` holds it."""
        known = ("key", "port", "devices", "start_timeout", "step_timeout")
        return json.dumps({name: value for name, value in asdict(self).items() if name in known})


def main() -> int:
    asked, report = _own_pipes()
    orders = Orders(**json.loads(asked.readline()))
    parent = os.getppid()
    threading.Thread(target=_end_with_parent, args=(asked, parent, orders.log_dir), daemon=True).start()
    found = run(orders)
    report.write(json.dumps(found) + "\n")
    report.flush()
    return 1 if found else 0


def _own_pipes() -> tuple[IO[str], IO[str]]:
    """Standard input and output under numbers that no child inherits. The ranks get the null device and the log."""
    asked, report = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return asked, report


def _end_with_parent(asked: IO[str], parent: int, log_dir: str) -> None:
    """The pipe ends when its other end is closed, but a program that forked may leave a copy of that behind: then its
    process id tells."""
    gone = threading.Event()

    def wait() -> None:
        asked.read()
        gone.set()

    threading.Thread(target=wait, daemon=True).start()
    while not gone.wait(0.25) and os.getppid() == parent:
        pass
    shutil.rmtree(log_dir, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)  # the kernel kills the ranks with it, also those that are stopped


def run(orders: Orders) -> dict[str, Any]:
    """Start the ranks and wait for their end. Returns what there is to report: nothing if they ended when told to."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from wan_core.workers.rendezvous import register  # not at the top: torch.distributed takes a second

    environment = {CONTROL: orders.control(), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    if "cpu" in orders.devices and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(orders.devices)))
    alone = orders.rendezvous is None
    here = alone or str(orders.rendezvous).rpartition(":")[0] in ("localhost", "127.0.0.1")
    if here and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing of one host's ranks is heard outside of it
    os.environ.update(environment)
    seconds = max(1, round(orders.start_timeout))
    config = LaunchConfig(
        min_nodes=orders.nodes,
        max_nodes=orders.nodes,
        nproc_per_node=len(orders.devices),
        run_id=orders.run_id,
        rdzv_backend=register(orders.run_id, min(60, seconds)) if alone else "c10d",
        rdzv_endpoint=orders.rendezvous or "localhost:0",
        # join: how long to wait for other hosts; read: for an answer of the rendezvous' store
        rdzv_configs={"join_timeout": seconds, "timeout": seconds, "read_timeout": min(60, seconds)},
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1" if here else None,
        logs_specs=DefaultLogsSpecs(log_dir=orders.log_dir, redirects=Std.ALL),
    )
    begin = time.monotonic()
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "wan_core.workers.worker")
    except ChildFailedError as fault:
        return {"failures": [_failure(rank, f, orders.log_dir) for rank, f in sorted(fault.failures.items())]}
    except (RendezvousError, RuntimeError, OSError, ValueError) as fault:
        where = "on this host" if alone else f"at {orders.rendezvous}"
        return {
            "error": f"the ranks could not be brought together {where} ({time.monotonic() - begin:.0f} s, "
            f"{orders.nodes} hosts): {type(fault).__name__}: {fault}. "
            + ("" if alone else "Is the port taken by another program, or closed, or did a host not start?")
        }
    return {}


def _failure(rank: int, failure: Any, log_dir: str) -> dict[str, Any]:
    """What is known of a rank that ended badly; `said` is what it wrote before, see `worker.last_words`."""
    data: Mapping[str, Any] = failure.error_file_data if isinstance(failure.error_file_data, dict) else {}
    message = data.get("message")
    said = message.get("wancore") if isinstance(message, dict) else None
    logs = sorted(Path(log_dir).glob(f"**/{failure.local_rank}/stderr.log"))
    tail = logs[-1].read_text(errors="replace")[-_TAIL:] if logs else ""
    return {
        "rank": rank,
        "pid": failure.pid,
        "exit": failure.exitcode,
        "signal": failure.signal_name() if failure.exitcode < 0 else None,
        "said": said,
        "tail": tail,
    }


if __name__ == "__main__":
    sys.exit(main())
