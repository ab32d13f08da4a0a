"""One video on the GPUs of several nodes: `launcher.Workers` whose ranks Ray placed.

Each node's actor starts our own supervisor and reports how it ended; that of the first node hands on what rank 0 says.
Requests, timeouts, interruption and messages are those of workers on one host.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from wan_core.checkpoint.safetensors_file import safetensors_pieces
from wan_core.cluster.actors import NodeRanks
from wan_core.cluster.connect import Wanted, check_token, connect, import_ray, nodes
from wan_core.cluster.files import media_of, model_paths, models_there, place_of, renamed
from wan_core.cluster.places import Reserved, spread
from wan_core.config import OptionError, UserError
from wan_core.config.outputs import written_beside
from wan_core.workers.control import ChannelClosed, unpack_tensors
from wan_core.workers.faults import places
from wan_core.workers.launcher import Workers
from wan_core.workers.options import WorkerOptions
from wan_core.workers.processes import Frame

POLL_SECONDS = 0.1
END_SECONDS = 6.0  # after one node's ranks ended: those of the others end by themselves, and say why
LOADED = ("options", "model", "vae", "text_encoder")  # fields of requests that name models


def cluster_workers(address: str, gpus: str | None, **options: Any) -> Workers:
    """Workers on the nodes of a Ray cluster. options: of `WorkerOptions`, without devices. Raises OptionError."""
    connect(address)
    wanted = Wanted.parse(gpus)
    counts = spread(wanted)
    devices = wanted.devices(sum(counts))
    return Workers(WorkerOptions(devices=devices, here=False, **options), partial(ClusterProcesses, wanted, address))


class ClusterProcesses:
    """Supervisors and ranks on the nodes of a cluster, see `processes.Processes`."""

    def __init__(self, wanted: Wanted, address: str, options: WorkerOptions) -> None:
        self.wanted, self.address, self.options = wanted, address, options
        self.inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.channel: Requests | None = None
        self.statuses: list[dict[str, Any]] = []
        self.last_frame = self.request_start = time.monotonic()
        self.report: dict[str, Any] | None = None
        self.ended = threading.Event()
        self.connected = threading.Event()
        self.keep: Path | None = None  # where the program wants the latents of this request
        self.names: dict[str, str] = {}  # files of this request on the nodes -> here
        self._logs, self._exit = "", None
        self._release: Callable[[], None] = lambda: None
        self._killed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def connect(self, timeout: float, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout
        while not self.connected.wait(POLL_SECONDS):
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no worker connected within {timeout:g} s")

    def kill(self) -> None:
        self._killed.set()
        self._release()
        self.ended.set()

    def exit_code(self) -> int | None:
        return self._exit

    def end_of_logs(self) -> str:
        return self._logs

    # ------------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        """Place the nodes' actors, start their ranks, and hand on what comes from rank 0 until the first of them
        ends."""
        try:
            self.report = self._watch(self._start())
        except UserError as fault:
            self.report = {"error": str(fault)}
        except BaseException as fault:
            self.report = {"error": f"{type(fault).__name__}: {fault}"}
            raise
        finally:
            self._release()
            self.ended.set()
            self.inbox.put(None)

    def _start(self) -> list[Any]:
        connect(self.address)
        ray = import_ray()
        place = Reserved(self.wanted, spread(Wanted(self.wanted.kind, len(self.options.devices))))
        self._release = place.release
        place.wait(self.options.start_timeout, self._raise_if_killed)
        actors = place.start(NodeRanks)
        try:
            self.nodes = ray.get([actor.describe.remote() for actor in actors])
            check_token(all(node["token"] for node in self.nodes))
            host, port = ray.get(actors[0].open_store.remote())
            run_id, options = uuid.uuid4().hex, asdict(self.options)
            meetings = [{"host": host, "port": port, "node": i, "nodes": len(actors)} for i in range(len(actors))]
            ray.get([a.start.remote(options, run_id, one) for a, one in zip(actors, meetings, strict=True)])
        except ray.exceptions.RayActorError as fault:
            raise OptionError(f"a node was lost while the ranks started: {str(fault).splitlines()[0]}") from None
        return actors

    def _raise_if_killed(self) -> None:
        if self._killed.is_set():
            raise OptionError("the ranks were ended before they started")

    def _watch(self, actors: list[Any]) -> dict[str, Any] | None:
        """Hand on frames. Returns the report of the end, of all nodes together."""
        ray = import_ray()
        ends = [actor.wait.remote() for actor in actors]
        answer = actors[0].frames.remote()
        while not self._killed.is_set():
            ready, _ = ray.wait([answer, *ends], timeout=1.0)
            try:
                if answer in ready:
                    if self._receive(ray.get(answer), actors):
                        break
                    answer = actors[0].frames.remote()
                elif ready:
                    ray.get(ready)
                    if ends[0] not in ready:
                        break
                    ends.remove(ends[0])  # of rank 0's node: what it sent last is received first
            except ray.exceptions.RayActorError:
                break
        return self._ends(actors)

    def _receive(self, found: Mapping[str, Any], actors: list[Any]) -> bool:
        """Returns whether the ranks have ended."""
        if found["connected"] is False and not found["ended"]:
            return False
        if found["connected"] and not self.connected.is_set():
            self.channel = Requests(self, actors)
            self.connected.set()
        self.last_frame = max(self.last_frame, time.monotonic() - found["age"])
        if found["statuses"] and (found["age"] < time.monotonic() - self.request_start):
            self.statuses = found["statuses"]
        for header, body, kept in found["frames"]:
            if kept is not None and self.keep is not None:
                header = self._keep(header, self.keep, kept)
            tensors = unpack_tensors(bytearray(body)) if body else {}
            self.inbox.put((renamed(header, self.names) if self.names else header, tensors))
        return found["ended"]

    def _keep(self, header: Mapping[str, Any], path: Path, content: bytes) -> dict[str, Any]:
        """Write latents that arrived where the program wants them, and tell it so."""
        try:
            with written_beside(path) as temporary:
                temporary.write_bytes(content)
        except OSError as fault:
            return {**header, "name": "not kept", "text": f"no latents in {path}: {fault}"}
        return {**header, "path": str(path)}

    def _ends(self, actors: list[Any]) -> dict[str, Any] | None:
        """How the ranks of all nodes ended, with the names of nodes that are gone."""
        ray = import_ray()
        failures, errors, gone = [], [], []
        for actor, node in zip(actors, self.nodes, strict=True):
            if self._killed.is_set():
                return None
            try:
                end = ray.get(actor.end.remote(0.0 if gone else END_SECONDS), timeout=END_SECONDS + 5)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                gone.append(node["name"])
                continue
            report = end["report"] or {}
            failures += report.get("failures", [])
            errors += [report["error"]] if "error" in report else []
            self._logs = self._logs or end["logs"]
            self._exit = end["exit"] if self._exit is None else self._exit
        alive = {node.id for node in nodes(self.wanted.kind)}
        gone += [node["name"] for node in self.nodes if node["id"] not in alive and node["name"] not in gone]
        if gone:
            where = places(self.statuses) or "before the first step"
            return {"error": f"the cluster lost {' and '.join(gone)}, last seen in: {where}"}
        if failures or not errors:
            return {"failures": failures} if failures else None
        return {"error": "; ".join(errors)}


class Requests:
    """Sends requests to rank 0, on another host: the files that they name are sent first."""

    def __init__(self, processes: ClusterProcesses, actors: list[Any]) -> None:
        self.processes, self.actors = processes, actors

    def send(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Raises ChannelClosed if rank 0 is gone, OptionError where a node lacks a file."""
        ray = import_ray()
        body = b"".join(safetensors_pieces(tensors, {})) if tensors else b""
        try:
            header = self._with_files(ray, dict(header)) if header["op"] not in ("interrupt", "shutdown") else header
            if not ray.get(self.actors[0].send.remote(dict(header), body)):
                raise ChannelClosed("rank 0 is gone")
        except ray.exceptions.RayActorError as fault:
            raise ChannelClosed(f"a node is gone: {fault}") from None

    def _with_files(self, ray: Any, header: dict[str, Any]) -> dict[str, Any]:
        """The request as the nodes understand it."""
        processes, lacking = self.processes, []
        header |= {name: models_there(header[name]) for name in LOADED if header.get(name) is not None}
        paths = [path for name in LOADED for path in model_paths(header.get(name) or {})]
        for node, found in zip(processes.nodes, ray.get([a.missing.remote(paths) for a in self.actors]), strict=True):
            lacking += [f"{node['name']} lacks {', '.join(found)}"] if found else []
        if lacking:
            raise OptionError(f"{'; '.join(lacking)}: models must be on every node (docs/cluster.md)")
        media = media_of(header.get("request") or {})
        if media:
            ray.get([actor.put.remote(media) for actor in self.actors])
            there = {path: place_of(path, content) for path, content in media.items()}
            header["request"] = renamed(header["request"], there)
            processes.names = {place: path for path, place in there.items()}
        processes.keep = None if header.get("keep") is None else Path(header["keep"])
        return header | ({"keep_clips": None} if "keep_clips" in header else {})
