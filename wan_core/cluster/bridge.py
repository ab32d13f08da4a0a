"""A process between a program and a cluster: Ray's driver of one run over several nodes.

`python -m wan_core.cluster.bridge`, started by `processes.py` in the place of the supervisor, with the same pipes and
report. Each node's actor starts our own supervisor and says how it ended; what rank 0 sends comes through its node's
actor and goes on to the program over the control channel, and requests go the other way.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from wan_core.cluster.actors import NodeRanks
from wan_core.cluster.connect import Wanted, ask, check_token, connect, import_ray, nodes
from wan_core.cluster.files import media_of, models_there, with_paths, with_words
from wan_core.cluster.places import Reserved, spread
from wan_core.config import OptionError, UserError
from wan_core.config.keys import model_paths
from wan_core.config.outputs import write_bytes
from wan_core.workers import control
from wan_core.workers.faults import places
from wan_core.workers.launcher import WorkerError
from wan_core.workers.supervisor import SupervisorOptions, main

END_SECONDS = 6.0  # after one node's ranks ended: those of the others end by themselves, and say why


class Bridge:
    """The ranks of one run, placed on nodes, as the program sees them."""

    def __init__(self, options: SupervisorOptions) -> None:
        self.options = options
        self.wanted = Wanted(options.kind, len(options.devices))
        self.run_id = uuid.uuid4().hex
        self.channel: control.Channel | None = None  # to the program, from when rank 0 is connected
        self.statuses: list[dict[str, Any]] = []
        self.request_start = time.monotonic()
        self.keep: Path | None = None  # where the program wants the latents of this request
        self.there: dict[str, str] = {}  # files of this request -> where they are on the nodes

    def run(self) -> dict[str, Any]:
        """From the reservation to the end of the ranks. Returns the report, {} if nothing failed."""
        try:
            connect(self.options.address)
            place = Reserved(self.wanted, spread(self.wanted))
            try:
                place.wait(0.8 * self.options.start_timeout)  # before the program's own timeout, which knows less
                self._start(place)
                return self._watch()
            finally:
                place.release()
        except UserError as fault:
            return {"error": str(fault)}

    def _start(self, place: Reserved) -> None:
        self.actors = place.start(NodeRanks)
        who = "a node of the ranks"
        self.nodes = ask([actor.describe.remote() for actor in self.actors], who)
        check_token(all(node["token"] for node in self.nodes))
        self.inputs = os.path.join(self.nodes[0]["temporary"], f"wancore-inputs-{self.run_id}")  # on every node
        host, port = ask(self.actors[0].open_store.remote(), who)
        options = asdict(self.options) | {"run_id": self.run_id, "inputs": self.inputs}
        meetings = [{"host": host, "port": port, "node": i, "nodes": len(self.actors)} for i in range(len(self.actors))]
        ask([a.start.remote(options, meeting) for a, meeting in zip(self.actors, meetings, strict=True)], who)

    # ------------------------------------------------------------------------------------------------ from the ranks

    def _watch(self) -> dict[str, Any]:
        """Hand on what rank 0 sends until the ranks of a node end. Returns the report of the end."""
        ray = import_ray()
        first = self.actors[0]
        ends = {actor.wait.remote(): actor for actor in self.actors}
        answer = first.frames.remote()
        ended = False
        while not ended:
            ready, _ = ray.wait([answer, *ends], timeout=1.0)
            try:
                if answer in ready:
                    ended = self._receive(ask(answer, "rank 0"))
                    answer = first.frames.remote()
                for end in ready:
                    if end in ends:
                        ask(end, "a node")
                        ended |= ends.pop(end) is not first  # of rank 0's node: what it sent last is received first
            except WorkerError:
                break
        return self._ends()

    def _receive(self, found: Mapping[str, Any]) -> bool:
        """Returns whether the ranks have ended."""
        if found["connected"] and self.channel is None:
            self.channel = control.connect(self.options.port, bytes.fromhex(self.options.key))
            threading.Thread(target=self._hand_on_requests, args=(self.channel,), daemon=True).start()
        if self.channel is None:
            return found["ended"]
        if found["statuses"] and found["age"] < time.monotonic() - self.request_start:
            self.statuses = found["statuses"]
            self.channel.send({"kind": "status", "ranks": self.statuses})
        for header, body, kept in found["frames"]:
            if kept is not None and self.keep is not None:
                header = self._keep(header, self.keep, kept)
            self.channel.send(self._as_here(header), control.unpack_tensors(bytearray(body)))
        return found["ended"]

    def _as_here(self, header: dict[str, Any]) -> dict[str, Any]:
        """What rank 0 sends, with the paths that the program knows in settings, reports and messages."""
        here = {place: path for path, place in self.there.items()}
        if "settings" in header:
            header = header | {"settings": with_paths(header["settings"], here)}
        if "report" in header:
            report = header["report"]
            header = header | {"report": report | {"settings": with_paths(report["settings"], here)}}
        return header | ({"text": with_words(header["text"], self.there)} if "text" in header else {})

    def _keep(self, header: Mapping[str, Any], path: Path, content: bytes) -> dict[str, Any]:
        """Write latents that arrived where the program wants them, and tell it so."""
        try:
            write_bytes(path, content)
        except OSError as fault:
            return {**header, "name": "not kept", "text": f"no latents in {path}: {fault}"}
        return {**header, "path": str(path)}

    def _ends(self) -> dict[str, Any]:
        """How the ranks of all nodes ended, with the names of nodes that are gone."""
        ray = import_ray()
        failures, errors, gone = [], [], []
        for actor, node in zip(self.actors, self.nodes, strict=True):
            end = actor.end.remote(0.0 if gone else END_SECONDS)
            try:
                ready, _ = ray.wait([end], timeout=END_SECONDS + 5)
                if not ready:
                    raise WorkerError("it does not answer")
                report = ask(end, node["name"])
            except WorkerError:
                gone.append(node["name"])
                continue
            failures += report.get("failures", [])
            errors += [report["error"]] if "error" in report else []
        alive = {node.id for node in nodes(self.wanted.kind)}
        gone += [node["name"] for node in self.nodes if node["id"] not in alive and node["name"] not in gone]
        if gone:
            where = places(self.statuses) or "before the first step"
            return {"error": f"the cluster lost {' and '.join(gone)}, last seen in: {where}"}
        if failures or not errors:
            return {"failures": failures} if failures else {}
        return {"error": "; ".join(errors)}

    # -------------------------------------------------------------------------------------------------- to the ranks

    def _hand_on_requests(self, channel: control.Channel) -> None:
        """A thread, as long as the program and rank 0 are there; `_watch` and `end_with_parent` see how they end."""
        while True:
            try:
                header, tensors = channel.receive()
                self._send(header, tensors)
            except OptionError as fault:
                channel.send({"kind": "error", "number": header["number"], "reason": "user", "text": str(fault)})
            except (control.ChannelError, WorkerError):
                return

    def _send(self, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """A request to rank 0; the files that it names are sent first. Raises OptionError where a node lacks a file,
        WorkerError if a node is gone."""
        if header["op"] not in ("interrupt", "shutdown"):
            self.request_start = time.monotonic()
            header = self._with_files(header)
        ask(self.actors[0].send.remote(header, control.pack_tensors(tensors)), "rank 0")

    def _with_files(self, header: dict[str, Any]) -> dict[str, Any]:
        """The request as the nodes understand it."""
        lacking = []
        header["models"] = models_there(header["models"])
        paths = model_paths(header["models"])
        missing = ask([actor.missing.remote(paths) for actor in self.actors], "a node")
        for node, found in zip(self.nodes, missing, strict=True):
            lacking += [f"{node['name']} lacks {', '.join(found)}"] if found else []
        if lacking:
            raise OptionError(f"{'; '.join(lacking)}: models must be on every node (docs/cluster.md)")
        media = media_of(header.get("request") or {})
        self.there = {}
        if media:
            content = import_ray().put(media)
            [self.there, *_] = ask([actor.put.remote(content) for actor in self.actors], "a node")
            header["request"] = with_paths(header["request"], self.there)
        self.keep = None if header.get("keep") is None else Path(header["keep"])
        return header | ({"keep_clips": None} if "keep_clips" in header else {})


if __name__ == "__main__":
    sys.exit(main(lambda options: Bridge(options).run()))
