"""Ports on which workers listen: no other host can reach them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.forked import forking
from tools.processes import below
from wan_core.config import LoadOptions, Request
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import Workers
from wan_core.workers.options import WorkerOptions

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.slow]

SMALL = {"prompt": "a red circle moving right on a blue background", "width": 48, "height": 48, "frames": 5, "steps": 2}
HERE = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}  # 127.0.0.1, ::1
LISTENING = "0A"


def listening(pids: set[int]) -> list[str]:
    """ADDRESS:PORT in hex of every socket on which these processes listen."""
    mine = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                mine |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
            except OSError:
                continue  # closed meanwhile
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *fields = line.split()
            if state == LISTENING and fields[5] in mine:
                addresses.append(local)
    return addresses


def test_workers_of_one_host_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    others = below(os.getpid())
    with forking(), Workers(WorkerOptions(devices=("cpu", "cpu"), mesh="1x1x2")) as workers:
        WorkerEngine(workers).generate(LoadOptions(model="tiny", device="cpu"), Request(**SMALL))
        addresses = listening(below(os.getpid()) - others)
    assert addresses and {place.partition(":")[0] for place in addresses} <= HERE
