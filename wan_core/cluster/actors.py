"""What runs on the nodes, as Ray's actors: a maker of whole videos, or the ranks of one node of a larger run.

Arguments and answers are plain data: options and headers as dictionaries, tensors and files as bytes. Faults that a
user can understand come back as text; others reach the program as Ray raises them.
"""

from __future__ import annotations

import functools
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from wan_core.cluster.connect import has_token
from wan_core.cluster.files import missing, put, with_paths, with_words
from wan_core.config.temporary import make_named_folder, own_folder

WAIT_SECONDS = 0.3  # for the next frame; an answer carries all that are there


class OnNode:
    """The part that both kinds of actors share: facts about their node."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        if "cpu" not in devices:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets 1 where no CPU was asked for

    def describe(self) -> dict[str, Any]:
        """{"name", "id", "token", "temporary"} of the node; token: whether it authenticates; temporary: its folder for
        temporary files."""
        import ray  # pyright: ignore[reportMissingImports]

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        name = f"{socket.gethostname()} ({address}, node {node[:6]})"
        return {"name": name, "id": node, "token": has_token(), "temporary": tempfile.gettempdir()}

    def missing(self, paths: Sequence[str]) -> list[str]:
        return missing(paths)


class VideoMaker(OnNode):
    """Makes videos of a list, one at a time, with ranks of its own that keep their models."""

    def __init__(self, devices: Sequence[str], mesh: str, step_timeout: float) -> None:
        super().__init__(devices)
        self.mesh, self.step_timeout = mesh, step_timeout
        self.engine: Any = None
        self.find: Any = None

    def check(
        self, loaded: Mapping[str, Any], request: Mapping[str, Any], media: Mapping[str, bytes]
    ) -> dict[str, Any]:
        """{"notes"} of the request's plan; {"lost"} where this node's disk failed; {"refused"}."""
        import torch

        from wan_core.config import LoadOptions, Request
        from wan_core.pipeline.check import check_request
        from wan_core.pipeline.sources import find_models
        from wan_core.workers.wire import unpack

        self.find = self.find or functools.cache(find_models)  # headers are read once

        def check(asked: Request, *_: object) -> dict[str, Any]:
            options, device = unpack(LoadOptions, loaded), torch.device(self.devices[0])
            return {"notes": check_request(options, asked, device, self.find).plan.lines}

        return self._with_media(request, media, check)

    def make(
        self, loaded: Mapping[str, Any], request: Mapping[str, Any], media: Mapping[str, bytes], key: str
    ) -> dict[str, Any]:
        """{"video", "report"} as bytes; {"lost"} where the ranks or this node's disk failed; {"refused"}."""
        from wan_core.config import LoadOptions, Request
        from wan_core.workers.client import WorkerEngine
        from wan_core.workers.launcher import Workers
        from wan_core.workers.options import WorkerOptions
        from wan_core.workers.video_list import ListedVideo, make_video
        from wan_core.workers.wire import unpack

        def make(asked: Request, folder: Path, names: Mapping[str, str]) -> dict[str, Any]:
            if self.engine is None:
                options = WorkerOptions(devices=self.devices, mesh=self.mesh, step_timeout=self.step_timeout)
                self.engine = WorkerEngine(Workers(options))
            video = ListedVideo(0, asked, folder / "video.mp4", key)
            make_video(self.engine, unpack(LoadOptions, loaded), video, partial(with_paths, names=names))
            return {"video": video.out.read_bytes(), "report": video.report.read_bytes()}

        return self._with_media(request, media, make)

    def _with_media(
        self, request: Mapping[str, Any], media: Mapping[str, bytes], act: Callable[..., dict[str, Any]]
    ) -> dict[str, Any]:
        """What `act` answers for the request with its files here, a folder for other files, and the paths of the files
        here -> those that the program knows."""
        from wan_core.config import Request, UserError
        from wan_core.workers.launcher import WorkerError
        from wan_core.workers.wire import unpack

        here = dict[str, str]()
        try:
            with tempfile.TemporaryDirectory(dir=own_folder("media")) as folder:
                here = put(media, folder)
                names = {there: path for path, there in here.items()}
                return act(unpack(Request, with_paths(request, here)), Path(folder), names)
        except WorkerError as fault:
            return {"lost": with_words(str(fault), here)}
        except UserError as fault:
            return {"refused": with_words(str(fault), here)}
        except OSError as fault:
            return {"lost": f"it could not write or read a file: {fault}"}


class NodeRanks(OnNode):
    """The ranks of one node that compute a video with those of other nodes. Node 0 has the store where they meet, and
    rank 0, whose frames it hands on."""

    def __init__(self, devices: Sequence[str]) -> None:
        super().__init__(devices)
        self.listening: socket.socket | None = None
        self.processes: Any = None
        self.connected = False
        self.heard = 0.0  # when rank 0's last status came that `frames` told of

    def open_store(self) -> tuple[str, int]:
        """Listen where the nodes will meet, on the interface that Ray uses."""
        import ray  # pyright: ignore[reportMissingImports]

        self.listening = socket.create_server((ray.util.get_node_ip_address(), 0), backlog=128)
        return self.listening.getsockname()[:2]

    def start(self, options: Mapping[str, Any], meeting: Mapping[str, Any]) -> None:
        """Start the ranks. options: of the run, as `SupervisorOptions` has them, its id and its folder for inputs.
        meeting: host, port, node and nodes of `rendezvous.Meeting`."""
        from wan_core.workers.options import WorkerOptions
        from wan_core.workers.processes import WorkerProcesses
        from wan_core.workers.rendezvous import Meeting

        descriptor = None if self.listening is None else self.listening.fileno()
        timeouts = {name: options[name] for name in ("start_timeout", "step_timeout", "heartbeat_timeout")}
        self.processes = WorkerProcesses(
            WorkerOptions(devices=self.devices, **timeouts),
            Meeting(**meeting, descriptor=descriptor),
            run_id=options["run_id"],
            inputs=options["inputs"],
            interface=interface_of(meeting["host"]) if meeting["node"] == 0 else own_interface(),
        )
        self.inputs = options["inputs"]
        if self.listening is not None:
            self.listening.close()  # the supervisor has it
            threading.Thread(target=self._connect, args=(timeouts["start_timeout"],), daemon=True).start()

    def _connect(self, timeout: float) -> None:
        with suppress(TimeoutError, OSError):  # the program's own timeout says so
            self.processes.connect(timeout)
            self.connected = True

    def put(self, media: Mapping[str, bytes]) -> dict[str, str]:
        """Files for all requests of this run, see `files.put`. They are deleted with this process."""
        if not os.path.isdir(self.inputs):
            make_named_folder(Path(self.inputs))
        return put(media, self.inputs)

    def send(self, header: dict[str, Any], body: bytes) -> bool:
        """A frame for rank 0; False if it is gone. A file that is to be kept goes into the folder of this node's ranks
        first, and is handed on with the frame that says so."""
        from wan_core.workers.control import ChannelError, unpack_tensors

        if header.get("keep") is not None:
            header = header | {"keep": os.path.join(self.processes.folder, "kept.safetensors")}
        try:
            self.processes.channel.send(header, unpack_tensors(bytearray(body)))
        except ChannelError:
            return False
        return True

    def frames(self) -> dict[str, Any]:
        """What rank 0 has sent since the last call: {"frames": [(header, body, kept file or None)], "statuses": those
        of the ranks, if they are new, "age": seconds since its last sign of life, "connected", "ended"}."""
        from wan_core.workers.control import pack_tensors

        processes, frames = self.processes, []
        try:
            frame = processes.inbox.get(timeout=WAIT_SECONDS)
            while True:
                if frame is not None:
                    header, tensors = frame
                    frames.append((header, pack_tensors(tensors), self._kept(header)))
                frame = processes.inbox.get_nowait()
        except queue.Empty:
            pass
        heard, self.heard = self.heard, processes.last_frame
        return {
            "frames": frames,
            "statuses": processes.statuses if self.heard > heard else [],
            "age": time.monotonic() - self.heard,
            "connected": self.connected,
            "ended": processes.ended.is_set() and not processes.inbox.qsize(),
        }

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
        """How the ranks ended, when they have, or after `seconds`: the report of their supervisor, with an error where
        there is none."""
        from wan_core.workers.faults import end_of_logs

        ended, report = self.processes.ended.wait(seconds), self.processes.report
        if report is None and ended:
            code, logs = self.processes.process.poll(), end_of_logs(self.processes.folder)
            report = {"error": f"the supervisor on {self.describe()['name']} ended with code {code}{logs}"}
        return report or {}


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
