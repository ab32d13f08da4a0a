"""Which devices work for a program, and how long it waits for them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from wan_core.config import OptionError
from wan_core.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The ranks of this host, and how long to wait for them, in seconds.

    start_timeout: until all ranks are there. step_timeout: for any rank to get somewhere, a step further or to the next
    phase. silence: for a sign of life of each. nodes, rendezvous, run_id: across hosts, HOST:PORT where they meet and
    the name that they share.
    """

    devices: tuple[str, ...]
    mesh: str = "auto"
    start_timeout: float = 300.0
    step_timeout: float = 600.0
    silence: float = 60.0
    nodes: int = 1
    rendezvous: str | None = None
    run_id: str | None = None

    def __post_init__(self) -> None:
        if sys.platform == "win32":
            raise OptionError("several GPUs need NCCL, which torch does not have on Windows: use one GPU, or WSL")
        if not self.devices:
            raise OptionError("no device given for the workers")
        for name in ("start_timeout", "step_timeout", "silence"):
            if not 1 <= getattr(self, name) <= 86400:
                raise OptionError(f"{name} {getattr(self, name):g} given; allowed are 1 to 86400 seconds")
        if self.nodes < 1 or (self.nodes > 1) != (self.rendezvous is not None):
            raise OptionError(
                f"{self.nodes} hosts given: more than one need a rendezvous, HOST:PORT, and one needs none"
            )
        if self.rendezvous is not None and not self.rendezvous.rpartition(":")[2].isdecimal():
            raise OptionError(f"rendezvous {self.rendezvous!r} given; write HOST:PORT of one of the hosts")
        if self.mesh != "auto":
            mesh = Mesh.parse(self.mesh)
            if self.nodes == 1 and mesh.size != len(self.devices):
                raise OptionError(
                    f"mesh {mesh} needs {mesh.size} ranks, and {len(self.devices)} devices are given: "
                    f"{', '.join(self.devices)}"
                )


def parse_devices(text: str, gpus: int) -> tuple[str, ...]:
    """The devices that a user means: `auto` or `all` (every GPU), how many, or a list like `0,1`, `cuda:2,cuda:3`,
    `cpu,cpu`. gpus: that this machine has. Raises OptionError."""
    said = text.strip().lower()
    if said in ("auto", "all"):
        if not gpus:
            raise OptionError("torch sees no NVIDIA GPU here: name the devices, for example cpu,cpu to try it out")
        return tuple(f"cuda:{i}" for i in range(gpus))
    if said.isdecimal():
        if not 1 <= int(said) <= gpus:
            raise OptionError(
                f"{said} GPUs given, and torch sees {gpus} here: give at most as many, or a list of devices (0,2 or "
                "cpu,cpu)"
            )
        return tuple(f"cuda:{i}" for i in range(int(said)))
    names = [name.strip() for name in said.split(",")]
    names = [f"cuda:{name}" if name.isdecimal() else name for name in names]
    for name in names:
        kind, _, index = name.partition(":")
        if name != "cpu" and (kind != "cuda" or not index.isdecimal()):
            raise OptionError(f"device {name!r} is not known; write a number of GPUs, or a list like 0,1 or cpu,cpu")
        if kind == "cuda" and int(index) >= gpus:
            raise OptionError(f"device {name!r} given, and torch sees {gpus} NVIDIA GPUs here")
    if len(set(names)) < len(names) and set(names) != {"cpu"}:
        raise OptionError(f"devices {text!r} given; every GPU serves one rank, and CPUs are not mixed with GPUs")
    if "cpu" in names and set(names) != {"cpu"}:
        raise OptionError(f"devices {text!r} given; CPUs and GPUs do not work together")
    return tuple(names)
