"""What runs on the nodes, as Ray's actors: a maker of whole videos, or the ranks of one node of a larger run.

Arguments and answers are plain data: options and headers as dictionaries, tensors and files as bytes. Faults that a
user can understand come back as text; others reach the program as Ray raises them.
"""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wan_core.cluster.connect import has_token
from wan_core.cluster.files import missing, put, renamed

WAIT_SECONDS = 0.3  # for the next frame; an answer carries all that are there


class OnNode:
    """What both actors tell of their node."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        if "cpu" not in devices:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets 1 where no CPU was asked for

    def describe(self) -> dict[str, Any]:
        """{"name", "id", "token"} of the node; token: whether it authenticates."""
        import ray  # pyright: ignore[reportMissingImports]

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        name = f"{socket.gethostname()} ({address}, node {node[:6]})"
        return {"name": name, "id": node, "token": has_token()}

    def missing(self, paths: Sequence[str]) -> list[str]:
        return missing(paths)

    def put(self, media: Mapping[str, bytes]) -> None:
        put(media)


class VideoMaker(OnNode):
    """Makes videos of a list, one at a time, with ranks of its own that keep their models."""

    def __init__(self, devices: Sequence[str], mesh: str, step_timeout: float) -> None:
        super().__init__(devices)
        self.mesh, self.step_timeout = mesh, step_timeout
        self.engine: Any = None

    def check(
        self, loaded: Mapping[str, Any], requests: Sequence[Mapping[str, Any]], media: Mapping[str, bytes]
    ) -> dict[str, Any]:
        """{"notes"} of all requests, or {"refused", "number"} of the first that cannot run on this node."""
        import torch

        from wan_core.config import LoadOptions, Request, UserError
        from wan_core.pipeline.check import check_request
        from wan_core.workers.wire import unpack

        notes: dict[str, None] = {}
        here = put(media)
        for number, request in enumerate(requests):
            try:
                asked = unpack(Request, renamed(request, here))
                checked = check_request(unpack(LoadOptions, loaded), asked, torch.device(self.devices[0]))
            except UserError as fault:
                return {"refused": str(fault), "number": number}
            notes |= dict.fromkeys(checked.job.plan.notes)
        return {"notes": list(notes)}

    def make(
        self, loaded: Mapping[str, Any], request: Mapping[str, Any], key: str, media: Mapping[str, bytes]
    ) -> dict[str, Any]:
        """{"video", "report"} as bytes; {"lost"} where the ranks or this node's disk failed; {"refused"}."""
        from wan_core.config import LoadOptions, Request, UserError
        from wan_core.workers.client import WorkerEngine
        from wan_core.workers.launcher import WorkerError, Workers
        from wan_core.workers.options import WorkerOptions
        from wan_core.workers.video_list import ListedVideo, make_video
        from wan_core.workers.wire import unpack

        try:
            if self.engine is None:
                options = WorkerOptions(devices=self.devices, mesh=self.mesh, step_timeout=self.step_timeout)
                self.engine = WorkerEngine(Workers(options))
            here = put(media)
            with tempfile.TemporaryDirectory(prefix="wancore-") as folder:
                asked = unpack(Request, renamed(request, here))
                video = ListedVideo(0, asked, Path(folder, "video.mp4"), key)
                names = {there: path for path, there in here.items()}
                make_video(self.engine, unpack(LoadOptions, loaded), video, partial(renamed, names=names))
                return {"video": video.out.read_bytes(), "report": video.report.read_bytes()}
        except WorkerError as fault:
            return {"lost": str(fault)}
        except UserError as fault:
            return {"refused": str(fault)}
        except OSError as fault:
            return {"lost": f"{self.describe()['name']} could not write or read a file: {fault}"}


class NodeRanks(OnNode):
    """The ranks of one node that compute a video with those of other nodes. Node 0 has the store where they meet, and
    rank 0, whose frames it hands on."""

    def __init__(self, devices: Sequence[str]) -> None:
        super().__init__(devices)
        self.folder = tempfile.mkdtemp(prefix="wancore-node-")
        self.listening: socket.socket | None = None
        self.processes: Any = None
        self.connected: bool | None = None

    def open_store(self) -> tuple[str, int]:
        """Listen where the nodes will meet, on the interface that Ray uses."""
        import ray  # pyright: ignore[reportMissingImports]

        self.listening = socket.create_server((ray.util.get_node_ip_address(), 0), backlog=128)
        return self.listening.getsockname()[:2]

    def start(self, options: Mapping[str, Any], run_id: str, meeting: Mapping[str, Any]) -> None:
        """Start the ranks. meeting: host, port, node and nodes of `rendezvous.Meeting`."""
        from wan_core.workers.options import WorkerOptions
        from wan_core.workers.processes import WorkerProcesses
        from wan_core.workers.rendezvous import Meeting

        descriptor = None if self.listening is None else self.listening.fileno()
        timeouts = {name: options[name] for name in ("start_timeout", "step_timeout", "heartbeat_timeout")}
        self.processes = WorkerProcesses(
            WorkerOptions(devices=self.devices, **timeouts),
            Meeting(**meeting, descriptor=descriptor),
            run_id=run_id,
            interface=interface_of(meeting["host"]) if meeting["node"] == 0 else own_interface(),
        )
        if self.listening is not None:
            self.listening.close()  # the supervisor has it
            threading.Thread(target=self._connect, args=(timeouts["start_timeout"],), daemon=True).start()

    def _connect(self, timeout: float) -> None:
        try:
            self.processes.connect(timeout)
            self.connected = True
        except (TimeoutError, OSError):
            self.connected = False

    def send(self, header: dict[str, Any], body: bytes) -> bool:
        """A frame for rank 0; False if it is gone. A file that is to be kept goes into this node's own folder first,
        and is handed on with the frame that says so."""
        from wan_core.workers.control import ChannelError, unpack_tensors

        if header.get("keep") is not None:
            header = header | {"keep": os.path.join(self.folder, "kept.safetensors")}
        try:
            self.processes.channel.send(header, unpack_tensors(bytearray(body)) if body else None)
        except ChannelError:
            return False
        return True

    def frames(self) -> dict[str, Any]:
        """What rank 0 has sent since the last call: {"frames": [(header, body, kept file or None)], "statuses", "age"
        (seconds since its last sign of life), "connected", "ended"}."""
        from wan_core.checkpoint.safetensors_file import safetensors_pieces

        processes, frames = self.processes, []
        try:
            frame = processes.inbox.get(timeout=WAIT_SECONDS)
            while True:
                if frame is not None:
                    header, tensors = frame
                    body = b"".join(safetensors_pieces(tensors, {})) if tensors else b""
                    frames.append((header, body, self._kept(header)))
                frame = processes.inbox.get_nowait()
        except queue.Empty:
            pass
        age = time.monotonic() - processes.last_frame
        ended = processes.ended.is_set() and not processes.inbox.qsize()
        state = {"statuses": processes.statuses, "age": age, "connected": self.connected, "ended": ended}
        return {"frames": frames, **state}

    def _kept(self, header: Mapping[str, Any]) -> bytes | None:
        if header.get("kind") != "event" or header.get("name") != "kept":
            return None
        kept = Path(header["path"])
        content = kept.read_bytes()
        kept.unlink()
        return content

    def wait(self) -> None:
        """Until the ranks of this node have ended."""
        self.processes.ended.wait()

    def end(self, seconds: float) -> dict[str, Any]:
        """How the ranks ended, when they have, or after `seconds`: {"report", "exit", "logs"}."""
        if self.processes is None:
            return {"report": None, "exit": None, "logs": ""}
        self.processes.ended.wait(seconds)
        logs = self.processes.end_of_logs()
        return {"report": self.processes.report, "exit": self.processes.exit_code(), "logs": logs}


def own_interface() -> str | None:
    import ray  # pyright: ignore[reportMissingImports]

    return interface_of(ray.util.get_node_ip_address())


def interface_of(address: str) -> str | None:
    """The network interface of this host that has the IPv4 address; None where that is not found."""
    import fcntl
    import struct

    SIOCGIFADDR = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
