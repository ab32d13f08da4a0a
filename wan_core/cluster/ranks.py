"""One video on the GPUs of several nodes: `launcher.Workers` whose ranks Ray placed.

A process of its own is Ray's driver (`bridge.py`). The program talks to it as it talks to the supervisor and rank 0 of
its own host, so requests, timeouts, interruption and messages are the same. Ray ends a driver a minute after its
cluster has lost its head: that is this process, and never ComfyUI.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import Any

from wan_core.cluster.connect import Wanted, check_ray
from wan_core.config import OptionError
from wan_core.workers.launcher import Workers
from wan_core.workers.options import WorkerOptions
from wan_core.workers.processes import WorkerProcesses, rank_environment

LOOK_SECONDS = 90.0  # for a cluster to say what it has


def cluster_workers(address: str, gpus: str | None, **options: Any) -> Workers:
    """Workers on the nodes of a Ray cluster. options: of `WorkerOptions`, without devices. Raises OptionError."""
    wanted = Wanted.parse(gpus)
    ranks = WorkerOptions(devices=wanted.devices(_ranks(address, gpus)), here=False, **options)
    begin = partial(WorkerProcesses, program="wan_core.cluster.bridge", address=address, kind=wanted.kind)
    return Workers(ranks, begin)


def _ranks(address: str, gpus: str | None) -> int:
    """How many ranks the cluster has room for, as many as are asked for. Raises OptionError."""
    check_ray()
    command = [sys.executable, "-m", "wan_core.cluster.places", address, gpus or "auto"]
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=rank_environment(),
            timeout=LOOK_SECONDS,
        )
    except subprocess.TimeoutExpired as fault:
        raise OptionError(f"the Ray cluster {address!r} did not answer within {LOOK_SECONDS:g} s") from fault
    try:
        found = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = ran.stderr.strip().splitlines() or [f"code {ran.returncode}"]
        raise OptionError(f"cannot connect to the Ray cluster {address!r}: {said[-1]}") from None
    if "refused" in found:
        raise OptionError(found["refused"])
    return found["ranks"]
