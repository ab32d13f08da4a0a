"""The connection to a Ray cluster: what must be there, who may connect, which nodes have what, and what actors answer,
with Ray's faults as ours."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan_core.config import OptionError
from wan_core.workers.launcher import WorkerError

INSTALL = "pip install 'ray>=2.60'"
WITHOUT_TOKEN = "WANCORE_RAY_WITHOUT_TOKEN"  # 1: clusters that authenticate nobody are allowed
ALLOWED = "WANCORE_CLUSTERS"  # addresses, separated by commas, that users of ComfyUI may name
REACH_SECONDS = 10.0  # for the head of a cluster to take a connection
PACKAGE = Path(__file__).resolve().parents[1]  # sent to the nodes, so that all run the same code
PASSED_ON = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # variables that the nodes' processes get


def check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise OptionError(f"a cluster needs Ray, which is not installed here: {INSTALL} (docs/cluster.md)")


def import_ray() -> Any:
    check_ray()
    import ray  # pyright: ignore[reportMissingImports]

    return ray


def has_token() -> bool:
    """Whether this process, and so what it connects to, uses Ray's tokens. Ray has no public function that says so,
    and its default differs between versions."""
    from ray._raylet import AuthenticationMode, get_authentication_mode  # pyright: ignore[reportMissingImports]

    return get_authentication_mode() == AuthenticationMode.TOKEN


def check_token(authenticates: bool) -> None:
    """Raise OptionError for a cluster without authentication, unless the user allowed it."""
    if not authenticates and os.environ.get(WITHOUT_TOKEN) != "1":
        raise OptionError(
            "the Ray cluster is not used: it asks for no token, so anyone who reaches its ports can run programs on "
            f"it. Start Ray with RAY_AUTH_MODE=token (docs/cluster.md), or set {WITHOUT_TOKEN}=1 where nobody else "
            "reaches it"
        )


def check_allowed(address: str) -> None:
    """Raise OptionError for an address that a workflow names and ComfyUI was not started with: who connects runs what
    the cluster sends, and sends it the token."""
    allowed = [one.strip() for one in os.environ.get(ALLOWED, "").split(",") if one.strip()]
    if address not in allowed:
        raise OptionError(
            f"cluster {address[:80]!r} given; allowed are {', '.join(allowed) or 'none'}: start ComfyUI with the "
            f"environment variable {ALLOWED}={address[:80]} (docs/cluster.md)"
        )


def connect(address: str) -> None:
    """Connect this process to the cluster, once. Raises OptionError."""
    ray = import_ray()
    check_token(has_token())
    if "://" in address:
        raise OptionError(
            f"address {address!r} given: Ray's client is not supported. Let this machine join the cluster, "
            "`ray start --address=HOST:PORT --num-cpus=0 --num-gpus=0`, and give `auto`"
        )
    if ray.is_initialized():
        return
    _check_reachable(address)
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            runtime_env={"py_modules": [str(PACKAGE)], "env_vars": environment, "excludes": ["**/__pycache__"]},
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as fault:
        raise OptionError(
            f"cannot connect to the Ray cluster {address!r}: {str(fault).splitlines()[0]}. Does its head run, and is "
            "the token here that of the cluster?"
        ) from fault


def _check_reachable(address: str) -> None:
    """Raise OptionError at once where nothing listens: Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), REACH_SECONDS).close()
        except (OSError, OverflowError) as fault:
            raise OptionError(f"cannot connect to the Ray cluster {address!r}: {fault}. Does its head run?") from fault


@dataclass(frozen=True)
class Wanted:
    """What `--gpus` asks of a cluster. kind: GPU or CPU. count: of all nodes together, None for all that there are."""

    kind: str
    count: int | None

    @classmethod
    def parse(cls, text: str | None) -> Wanted:
        words = (text or "auto").strip().lower()
        if words in ("auto", "all"):
            return cls("GPU", None)
        if words.isdecimal() and 1 <= int(words) <= 10_000:
            return cls("GPU", int(words))
        if set(words.split(",")) == {"cpu"}:
            return cls("CPU", words.count("cpu"))
        raise OptionError(f"--gpus {words[:40]!r} given; on a cluster write how many GPUs, auto for all, or cpu,cpu")

    def devices(self, count: int) -> tuple[str, ...]:
        """Those of one node that has so many for us: Ray shows each process its own GPUs alone, numbered from 0."""
        return ("cpu",) * count if self.kind == "CPU" else tuple(f"cuda:{i}" for i in range(count))


@dataclass(frozen=True)
class Node:
    """A node that is alive. has: how many of the wanted kind it has for everyone together."""

    id: str
    name: str
    has: int


def nodes(kind: str) -> list[Node]:
    """Those that are alive and have any, the largest first."""
    alive = [node for node in import_ray().nodes() if node["Alive"]]
    found = [Node(node["NodeID"], node_name(node), int(node["Resources"].get(kind, 0))) for node in alive]
    return sorted((node for node in found if node.has), key=lambda node: (-node.has, node.id))


def node_name(node: Mapping[str, Any]) -> str:
    """`gpu-7 (10.0.0.7, node 3f2a91)`: hosts may have several nodes."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, node {node['NodeID'][:6]})"


def inventory(found: Sequence[Node], kind: str) -> str:
    """`gpu-7 (...): 8; gpu-8 (...): 8`."""
    return "; ".join(f"{node.name}: {node.has}" for node in found) or f"no node has a {kind}"


def ask(answers: Any, who: str) -> Any:
    """What actors of `who` answer. Raises WorkerError where a process or node is gone, OptionError where no actor can
    run, and what an actor raised that is a fault of ours."""
    ray = import_ray()
    faults = ray.exceptions
    try:
        return ray.get(answers)
    except faults.RayTaskError:
        raise
    except faults.RayError as fault:
        never_ran = (faults.RuntimeEnvSetupError, faults.ActorUnschedulableError)
        if isinstance(fault, never_ran) or getattr(fault, "actor_init_failed", False):
            raise OptionError(f"{who} cannot run WanCore: {cause_of(fault)}") from fault
        raise WorkerError(f"{who} is gone: {cause_of(fault)}") from fault


def cause_of(fault: BaseException) -> str:
    """The line of Ray's message that says why: the last of a traceback, else the one that begins so."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()] or [type(fault).__name__]
    if any(line.startswith(("Traceback", "File ")) for line in lines):
        return lines[-1]
    return next((line for line in lines if line.startswith("The actor died because")), lines[0])
