"""A real ComfyUI, started headless and driven over HTTP and its websocket as any client does.

Its Python: COMFYUI_PYTHON, or `.venv` inside the checkout, or this one.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wan_core.config import OptionError

PACK = Path(__file__).resolve().parents[1]
PATIENCE = 120.0  # seconds for anything: a busy machine is slow, not broken
# On a CPU one thread: two that wait for each other on a busy machine take ten times as long. Large blocks of memory
# from the system and back to it at once, where the allocator would keep them for later: what is freed can be seen.
# Workers on the CPU are allowed.
QUIET = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20), "WANCORE_ALLOW_CPU_WORKERS": "1"}
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Graph = dict[str, dict[str, Any]]


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def find_checkout(given: Path | None = None) -> Path:
    """The folder of ComfyUI: `given`, or COMFYUI_PATH, or ~/comfy/ComfyUI. Raises OptionError where there is none."""
    path = given or Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
    if not (path / "main.py").is_file():
        raise OptionError(f"no ComfyUI at {path}: name its folder with COMFYUI_PATH")
    return path


def python_of(checkout: Path) -> str:
    inside = checkout / ".venv" / "bin" / "python"
    return os.environ.get("COMFYUI_PYTHON") or (str(inside) if inside.exists() else sys.executable)


def make_base(base: Path, packs: Mapping[str, str] | None = None) -> Path:
    """A base directory with this pack in custom_nodes, and single-file packs of the given source beside it."""
    for name in ("custom_nodes", "models", "input", "output"):
        (base / name).mkdir(parents=True, exist_ok=True)
    (base / "custom_nodes" / "wancore").symlink_to(PACK, target_is_directory=True)
    for name, source in (packs or {}).items():
        (base / "custom_nodes" / f"{name}.py").write_text(source)
    return base


def without_page(base: Path) -> list[str]:
    """Arguments of a server that has an empty page: its own comes in a package that benchmarks do without."""
    page = base / "page"
    page.mkdir(parents=True, exist_ok=True)
    (page / "index.html").write_text("<!doctype html><title>ComfyUI</title>")
    return ["--front-end-root", str(page)]


@dataclass
class Run:
    """What came of a prompt: its status messages, UI outputs, and what the websocket told meanwhile. begin: when it
    was posted (`time.time`, as in status messages)."""

    id: str
    status: dict[str, Any]
    outputs: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    begin: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status["status_str"] == "success"

    def message(self, kind: str) -> dict[str, Any]:
        return next(data for name, data in self.status["messages"] if name == kind)

    @property
    def fault(self) -> str:
        """Which node failed, and what it said."""
        said = next((data for kind, data in self.status["messages"] if kind == "execution_error"), {})
        return f"{said.get('node_id')}: {str(said.get('exception_message', 'interrupted'))[:500]}"

    @property
    def cached(self) -> list[str]:
        return self.message("execution_cached")["nodes"]


class Refused(AssertionError):
    """The prompt did not pass validation; `errors` by node id."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(f"{body['error']['message']} {json.dumps(body['node_errors'])}"[:2000])
        self.errors: dict[str, Any] = body["node_errors"]


class ComfyUI:
    """A server that runs until `stop`. cpu: without a GPU. patience: seconds for a prompt."""

    def __init__(
        self,
        checkout: Path,
        base: Path,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        *,
        cpu: bool = True,
        patience: float = PATIENCE,
    ) -> None:
        self.base, self.patience = base, patience
        self.log_path = base / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [python_of(checkout), "main.py", "--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--disable-api-nodes", "--database-url", "sqlite:///:memory:", "--base-directory", str(base)]
        command += [*(["--cpu"] if cpu else []), *arguments]
        with self.log_path.open("w") as log:
            settings = {**os.environ, **(QUIET if cpu else {}), **(environment or {})}
            self.process = subprocess.Popen(command, cwd=checkout, stdout=log, stderr=subprocess.STDOUT, env=settings)
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + max(PATIENCE, self.patience)
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended while starting:\n{self.log()[-4000:]}")
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise TimeoutError(f"ComfyUI did not start:\n{self.log()[-4000:]}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # HTTP

    def get(self, path: str) -> Any:
        with LOCAL.open(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with LOCAL.open(request, timeout=30) as answer:
            return answer.read()

    def queue(self, graph: Graph, client: str = "") -> str:
        """The prompt's id. Raises Refused."""
        try:
            return json.loads(self.post("/prompt", {"prompt": graph, "client_id": client}))["prompt_id"]
        except urllib.error.HTTPError as fault:
            raise Refused(json.load(fault)) from None

    def wait(self, prompt_id: str) -> Run:
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                return Run(prompt_id, entry["status"], entry["outputs"])
            assert self.process.poll() is None, self.log()[-4000:]
            time.sleep(0.05)
        raise TimeoutError(f"prompt {prompt_id} did not end:\n{self.log()[-4000:]}")

    def run(self, graph: Graph) -> Run:
        return self.wait(self.queue(graph))

    def watch(self, graph: Graph) -> Run:
        """Run the graph and keep every event of the websocket, with its time (`time.time`) in `at`."""
        client = Client(self.port, self.patience)
        begin = time.time()
        prompt_id = self.queue(graph, client.name)
        events = []
        for event in client.events():
            events.append({**event, "at": time.time()})
            over = event["type"] == "executing" and event["data"]["node"] is None
            if over or event["type"] in ("execution_error", "execution_interrupted"):
                break
        client.close()
        run = self.wait(prompt_id)
        run.events, run.begin = events, begin
        return run

    def output_files(self, run: Run, node: str) -> list[Path]:
        """The files that an output node saved: ComfyUI lists pictures and videos under one name, latents under
        another."""
        saved = run.outputs[node].get("images") or run.outputs[node].get("latents", ())
        return [self.base / one["type"] / one["subfolder"] / one["filename"] for one in saved]

    def output_file(self, run: Run, node: str, index: int = 0) -> Path:
        return self.output_files(run, node)[index]


class Client:
    """A websocket client of the few features that ComfyUI's server uses (RFC 6455, no fragments)."""

    def __init__(self, port: int, patience: float = PATIENCE) -> None:
        self.name = secrets.token_hex(8)
        self.socket = socket.create_connection(("127.0.0.1", port), patience)
        self.stream = self.socket.makefile("rb")
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        self.socket.sendall(
            f"GET /ws?clientId={self.name} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        while self.stream.readline().strip():
            pass

    def events(self) -> Iterator[dict[str, Any]]:
        """Text messages as they are; binary ones as {"type": "preview" | "text", "data": ...}."""
        while True:
            first, second = self.stream.read(2)
            length = second & 127
            if length > 125:
                length = int.from_bytes(self.stream.read(2 if length == 126 else 8), "big")
            payload = self.stream.read(length)
            if first & 15 == 1:
                yield json.loads(payload)
            elif first & 15 == 2:
                kind, extra = struct.unpack(">II", payload[:8])
                if kind == 3:  # length of the node's id, the id, a text
                    node, text = payload[8 : 8 + extra].decode(), payload[8 + extra :].decode()
                    yield {"type": "text", "node": node, "data": text}
                else:
                    yield {"type": "preview", "data": payload[8:]}
            elif first & 15 == 8:
                return

    def close(self) -> None:
        self.stream.close()
        self.socket.close()
