"""A real browser for tests: Chromium through chromedriver's own HTTP interface (W3C WebDriver), and ComfyUI's page in
it. Where they are: CHROMIUM and CHROMEDRIVER, or on the path. COMFYUI_FRONTEND: the `static` folder of another
comfyui-frontend-package than the one that ComfyUI's Python has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comfyui import LOCAL, ComfyUI

START = 60.0  # seconds until the page is there
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server")
FLAGS += ("--window-size=1600,1000", "--no-first-run", "--disable-background-networking", "--disable-sync")
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False}
WATCH = """window.toasts = []; new MutationObserver((changes) => {
  for (const change of changes) for (const node of change.addedNodes) if (node.innerText) toasts.push(node.innerText);
}).observe(document.body, { childList: true, subtree: true });"""  # they go after a while
READY = "return Boolean(window.app?.graph && window.app.extensionManager && window.app.canvas)"


def find_browser() -> tuple[str, str]:
    """Chromium and its driver, or skip the test."""
    programs = [
        os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
        for variable, names in (("CHROMIUM", ("chromium", "google-chrome")), ("CHROMEDRIVER", ("chromedriver",)))
    ]
    if programs[0] is None or programs[1] is None:
        pytest.skip("no Chromium with chromedriver: install both, or set CHROMIUM and CHROMEDRIVER")
    return programs[0], programs[1]


class Browser:
    """One window. Everything in it goes through `script`."""

    def __init__(self, chromium: str, driver: str) -> None:
        self.profile = tempfile.TemporaryDirectory()
        self.log = Path(self.profile.name) / "chromedriver.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([driver, "--port=0"], stdout=log, stderr=subprocess.STDOUT)
        try:
            self.address = f"http://127.0.0.1:{self._port()}"
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={self.profile.name}/profile"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self.address += f"/session/{session['sessionId']}"
            self.call("POST", "/timeouts", {"script": 300_000, "pageLoad": 120_000})
        except BaseException:
            self.stop()
            raise

    def _port(self) -> int:
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            for line in self.log.read_text().splitlines():
                if "started successfully on port " in line:
                    return int(line.rsplit(" ", 1)[1].rstrip("."))
            time.sleep(0.05)
        raise TimeoutError(f"chromedriver did not start:\n{self.log.read_text()}")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The value that the driver answers with."""
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with LOCAL.open(request, timeout=330) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as fault:
            raise RuntimeError(json.load(fault)["value"]["message"]) from None

    def script(self, source: str, *arguments: Any) -> Any:
        """What the body of a function returns; a promise is waited for."""
        return self.call("POST", "/execute/sync", {"script": source, "args": list(arguments)})

    def faults(self) -> list[str]:
        """What the page wrote to its console as an error since the last call."""
        entries = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def open(self, address: str) -> None:
        """ComfyUI's page, ready."""
        self.call("POST", "/url", {"url": address})
        self.wait(READY, START)

    def wait(self, source: str, seconds: float = 30.0) -> Any:
        """What `source` returns as soon as that is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = self.script(source)
            if value:
                return value
            time.sleep(0.2)
        raise TimeoutError(f"{source} stayed false for {seconds:g} s")

    def stop(self) -> None:
        if "/session/" in getattr(self, "address", ""):
            self.call("DELETE", "")
        self.process.terminate()
        self.process.wait(20)
        self.profile.cleanup()


def front_end() -> list[str]:
    """The arguments by which ComfyUI serves the page that is tested."""
    folder = os.environ.get("COMFYUI_FRONTEND")
    return ["--front-end-root", folder] if folder else []


@contextmanager
def page_of(comfy: ComfyUI, vue: bool = False) -> Iterator[Browser]:
    """ComfyUI's page, its toasts noted. vue: drawn by Nodes 2.0."""
    comfy.post("/api/settings", SETTINGS | {"Comfy.VueNodes.Enabled": vue})
    browser = Browser(*find_browser())
    try:
        browser.open(f"http://127.0.0.1:{comfy.port}")
        time.sleep(2)
        browser.script(WATCH)
        yield browser
    finally:
        browser.stop()
