"""Which devices the worker processes use, and how long the program waits for them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from wan_core.config import OptionError
from wan_core.parallel.mesh import Mesh
from wan_core.workers.supervisor import available_cores

ALLOW_CPU = "WANCORE_ALLOW_CPU_WORKERS"  # 1: users of ComfyUI may start workers on the CPU (docs/headless.md)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The ranks, of this host or of all nodes of a cluster that compute one video. Timeouts are in seconds.

    start_timeout: until all ranks are ready. step_timeout: until any rank reaches the next step or phase.
    heartbeat_timeout: between two heartbeats of a rank. here: the ranks are all on this host. Raises OptionError.
    """

    devices: tuple[str, ...]
    mesh: str = "auto"
    start_timeout: float = 300.0
    step_timeout: float = 600.0
    heartbeat_timeout: float = 30.0
    here: bool = True

    def __post_init__(self) -> None:
        if sys.platform == "win32":
            raise OptionError("several GPUs need NCCL, which torch does not have on Windows: use one GPU, or WSL")
        if not self.devices:
            raise OptionError("no device given for the workers")
        if self.here and self.devices.count("cpu") > most_cpu_workers():
            raise OptionError(
                f"{self.devices.count('cpu')} workers on the CPU given; allowed are {most_cpu_workers()}, one for each "
                "core that this process may use"
            )
        for name in ("start_timeout", "step_timeout", "heartbeat_timeout"):
            if not 1 <= getattr(self, name) <= 86400:
                raise OptionError(f"{name} {getattr(self, name):g} given; allowed are 1 to 86400 seconds")
        if self.mesh != "auto":
            mesh = Mesh.parse(self.mesh)
            if mesh.size != len(self.devices):
                raise OptionError(
                    f"mesh {mesh} needs {mesh.size} ranks, and {len(self.devices)} devices are given: "
                    f"{', '.join(self.devices)}"
                )


def group_size(mesh: str, count: int | None) -> int:
    """How many GPUs each video of a list has: one, or as many as the mesh needs. count: all that are given, None for
    all that there are. Raises OptionError."""
    size = 1 if mesh == "auto" else Mesh.parse(mesh).size
    if count is not None and count % size:
        raise OptionError(
            f"mesh {mesh} needs {size} GPUs for each video, and {count} are given: give a multiple of {size}"
        )
    return size


def most_cpu_workers() -> int:
    """One for each core that this process may use, and always two, so that `cpu,cpu` can be tried anywhere."""
    return max(2, available_cores())


def parse_devices(text: str, gpus: int, *, cpu: bool = True) -> tuple[str, ...]:
    """The devices that `text` names: `auto` or `all` (every GPU), how many, or a list like `0,1`, `cuda:2,cuda:3`,
    `cpu,cpu`. gpus: how many this machine has. cpu: whether workers on the CPU are allowed. Raises OptionError."""
    given, try_it = text.strip().lower(), "name the devices cpu,cpu to try it"
    if not cpu:
        try_it += f", with ComfyUI started with the environment variable {ALLOW_CPU}=1"
    if given in ("auto", "all"):
        if not gpus:
            raise OptionError(f"torch finds no NVIDIA GPU here: {try_it}")
        return tuple(f"cuda:{i}" for i in range(gpus))
    if given.isdecimal():
        if len(given) > 6 or not 1 <= int(given) <= gpus:
            advice = "give at most as many, or a list of devices (0,2)" if gpus else try_it
            raise OptionError(f"{given[:20]} GPUs given, and torch finds {gpus} here: {advice}")
        return tuple(f"cuda:{i}" for i in range(int(given)))
    names = [name.strip() for name in given.split(",")]
    names = [f"cuda:{name}" if name.isdecimal() else name for name in names]
    for name in names:
        kind, _, index = name.partition(":")
        if name != "cpu" and (kind != "cuda" or not index.isdecimal()):
            raise OptionError(
                f"device {name[:20]!r} is not known; write a number of GPUs, or a list like 0,1 or cpu,cpu"
            )
        if kind == "cuda" and (len(index) > 6 or int(index) >= gpus):
            raise OptionError(f"device {name[:20]!r} given, and torch finds {gpus} NVIDIA GPUs here")
    if "cpu" in names and not cpu:
        raise OptionError(
            f"devices {text[:80]!r} given; workers on the CPU are off here: name GPUs, or start ComfyUI with the "
            f"environment variable {ALLOW_CPU}=1"
        )
    if "cpu" in names and set(names) != {"cpu"}:
        raise OptionError(f"devices {text[:80]!r} given; CPU and GPU workers cannot be mixed")
    if len(set(names)) < len(names) and set(names) != {"cpu"}:
        raise OptionError(f"devices {text[:80]!r} given; name each GPU once")
    return tuple(names)
