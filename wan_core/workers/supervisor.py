"""Starts the ranks of one host with torch's elastic launcher and reports how they ended.

`python -m wan_core.workers.supervisor`, started by `processes.py`. It reads one line of JSON from its standard input
(`SupervisorOptions`) and writes one to its standard output when the ranks have ended: {"failures": [...]},
{"error": "..."}, or {} if nothing failed. Its standard input stays open as long as the program that started it lives.
When it is closed, this process ends, and the kernel ends the ranks with it (see `worker.end_with_parent`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

CONTROL = "WANCORE_CONTROL"  # environment variable for the ranks of this host: `SupervisorOptions.control`
LOG_CHARACTERS = 2000  # reported from the end of a rank's log


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    """key, port: of the control channel, which rank 0 connects to, key as hex. meeting: the fields of
    `rendezvous.Meeting`, None for one host. interface: of the network, for the exchanges between hosts. inputs: a
    folder that is deleted at the end. address, kind: of a cluster, and of its devices, GPU or CPU, for
    `wan_core.cluster.bridge`, which runs in this program's place."""

    key: str
    port: int
    devices: tuple[str, ...]
    run_id: str
    log_dir: str
    start_timeout: float
    step_timeout: float
    heartbeat_timeout: float
    meeting: dict[str, Any] | None = None
    interface: str | None = None
    inputs: str | None = None
    address: str = ""
    kind: str = ""

    def control(self) -> str:
        """What the ranks need of it, as JSON."""
        known = ("key", "port", "devices", "start_timeout", "step_timeout")
        return json.dumps({name: value for name, value in asdict(self).items() if name in known})


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores(ranks: int) -> None:
    """Set the OpenMP environment for ranks on the CPU, unless the user did. Idle OpenMP threads must not spin: where
    more threads than cores exist, spinning takes the cores from threads that have work."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // ranks)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "0")


def main(run: Callable[[SupervisorOptions], dict[str, Any]]) -> int:
    """A program between worker processes and who started it. run: returns the report of their end."""
    stdin, report = own_pipes()
    options = SupervisorOptions(**json.loads(stdin.readline()))
    parent = os.getppid()
    threading.Thread(target=end_with_parent, args=(stdin, parent), daemon=True).start()
    found = run(options)
    if options.inputs is not None:
        shutil.rmtree(options.inputs, ignore_errors=True)
    report.write(json.dumps(found) + "\n")
    report.flush()
    return 1 if found else 0


def own_pipes() -> tuple[IO[str], IO[str]]:
    """Standard input and output as files that no child inherits. The ranks get the null device and the log."""
    stdin, report = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return stdin, report


def end_with_parent(stdin: IO[str], parent: int) -> None:
    """A thread: kill this process when the program has ended. Its end of the pipe may stay open in a process that it
    forked, so the parent's process id is checked as well."""
    gone = threading.Event()

    def wait() -> None:
        stdin.read()
        gone.set()

    threading.Thread(target=wait, daemon=True).start()
    while not gone.wait(0.25) and os.getppid() == parent:
        pass
    os.kill(os.getpid(), signal.SIGKILL)  # the kernel kills the ranks with it, also those that are stopped


def run(options: SupervisorOptions) -> dict[str, Any]:
    """Start the ranks and wait for their end. Returns the report, {} if nothing failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # not at the top: torch.distributed takes a second
    from wan_core.workers.control import LOOPBACK
    from wan_core.workers.rendezvous import Meeting, register

    meeting = None if options.meeting is None else Meeting(**options.meeting)
    if options.interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, options.interface)
    elif meeting is None and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks of one host listen to that host alone
    os.environ.update({CONTROL: options.control(), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"})
    if "cpu" in options.devices:
        share_cores(len(options.devices))
    seconds = max(1, round(options.start_timeout))
    begin, nodes = time.monotonic(), 1 if meeting is None else meeting.nodes
    try:
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=len(options.devices),
            run_id=options.run_id,
            rdzv_backend=register(options.run_id, min(60, seconds), meeting),
            rdzv_endpoint="localhost:0",
            # join: wait for other hosts; read: wait for an answer of the rendezvous store
            rdzv_configs={"join_timeout": seconds, "timeout": seconds, "read_timeout": min(60, seconds)},
            max_restarts=0,
            monitor_interval=0.1,
            local_addr=LOOPBACK if meeting is None else None,
            logs_specs=DefaultLogsSpecs(log_dir=options.log_dir, redirects=Std.ALL),
        )
        elastic_launch(config, sys.executable)("-u", "-m", "wan_core.workers.worker")
    except ChildFailedError as fault:
        return {"failures": [_failure(rank, f, options.log_dir) for rank, f in sorted(fault.failures.items())]}
    except (RendezvousError, RuntimeError, OSError, ValueError) as fault:
        where = "on this host" if meeting is None else f"at {meeting.host}:{meeting.port}"
        return {
            "error": f"the ranks could not connect to each other {where} ({time.monotonic() - begin:.0f} s, "
            f"{nodes} hosts): {type(fault).__name__}: {fault}. "
            + ("" if meeting is None else "May the nodes connect to each other on all ports?")
        }
    return {}


def _failure(rank: int, failure: Any, log_dir: str) -> dict[str, Any]:
    """What is known of a rank that failed; `said` is what it reported itself (`faults.write_error_file`)."""
    data: Mapping[str, Any] = failure.error_file_data if isinstance(failure.error_file_data, dict) else {}
    message = data.get("message")
    said = message.get("wancore") if isinstance(message, dict) else None
    logs = sorted(Path(log_dir).glob(f"**/{failure.local_rank}/stderr.log"))
    tail = logs[-1].read_text(errors="replace")[-LOG_CHARACTERS:] if logs else ""
    return {
        "rank": rank,
        "pid": failure.pid,
        "exit": failure.exitcode,
        "signal": failure.signal_name() if failure.exitcode < 0 else None,
        "said": said,
        "tail": tail,
    }


if __name__ == "__main__":
    sys.exit(main(run))
