"""A ComfyUI that runs graphs for the recording, through its API."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from tools.golden.commands import Case, normal, numbers, pixels
from tools.golden.environment import ENVIRONMENT, ROOT

Graph = dict[str, dict[str, Any]]
Link = list[Any]
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))
LIMIT = 180.0  # seconds for a start, or a prompt
FOLDERS = {  # what is in the name of a file -> its folder among ComfyUI's models; the first that fits
    "lora": "loras", "lightx2v": "loras", "umt5": "text_encoders", "vae": "vae", "vision": "clip_vision",
    "wav2vec2": "audio_encoders", "": "diffusion_models",
}  # fmt: skip
EXAMPLES = {"example.png": "start.png", "example.mp4": "video.avi", "example.mp3": "sound.wav"}  # of the workflows
# AudioEncoderEncode has one size of model only: what it would give, as long as the sound, from seeded numbers.
SOUND = """
import torch

class GoldenSound:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("AUDIO_ENCODER_OUTPUT",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("INT", {"max": 10**9})}}

    def run(self, samples):
        draw = torch.Generator().manual_seed(3)
        layers = [torch.randn(1, samples // 320 - 1, 128, generator=draw) for _ in range(3)]
        return ({"encoded_audio_all_layers": layers, "audio_samples": samples},)

NODE_CLASS_MAPPINGS = {"GoldenSound": GoldenSound}
"""


def place_of(comfyui: Path) -> list[str]:
    """The Python of a checkout: COMFYUI_PYTHON, else the one in its `.venv`, else this one."""
    inside = comfyui / ".venv/bin/python"
    return [os.environ.get("COMFYUI_PYTHON") or str(inside if inside.exists() else sys.executable), "main.py"]


def make_base(base: Path, files: Path, names: dict[str, str]) -> None:
    """A base directory with the pack, models and inputs. names: a model's name in it -> the file that it is."""
    for folder in ("custom_nodes", "input", "output", "page"):
        (base / folder).mkdir(parents=True)
    (base / "page/index.html").write_text("<!doctype html><title>ComfyUI</title>")
    (base / "custom_nodes/wancore").symlink_to(ROOT, target_is_directory=True)
    (base / "custom_nodes/golden_sound.py").write_text(SOUND)
    for name, source in names.items():
        folder = base / "models" / next(there for part, there in FOLDERS.items() if part in name.lower())
        folder.mkdir(parents=True, exist_ok=True)
        os.link(files / source, folder / name)
    for path in [*files.glob("*.png"), *files.glob("*.avi"), *files.glob("*.wav")]:
        os.link(path, base / "input" / path.name)
    for name, source in EXAMPLES.items():
        os.link(files / source, base / "input" / name)


class Server:
    """Runs until `stop`."""

    def __init__(self, comfyui: Path, base: Path) -> None:
        self.base = base
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        words = ["--cpu", "--listen", "127.0.0.1", "--port", str(self.port), "--disable-api-nodes", "--cache-lru", "30"]
        words += ["--database-url", "sqlite:///:memory:", "--base-directory", str(base), "--front-end-root"]
        with (base / "server.log").open("w") as log:
            self.process = subprocess.Popen(
                [*place_of(comfyui), *words, str(base / "page")], cwd=comfyui, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, "WANCORE_CACHE": str(base / "cache"), "PYTHONPATH": ""},
            )  # fmt: skip
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"ComfyUI did not start:\n{self.log()[-4000:]}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        return (self.base / "server.log").read_text(errors="replace")

    def get(self, path: str) -> Any:
        with LOCAL.open(f"http://127.0.0.1:{self.port}{path}", timeout=LIMIT) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any) -> Any:
        """The answer, also of a refusal, which is no error here."""
        data, header = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, header)
        try:
            with LOCAL.open(request, timeout=LIMIT) as answer:
                return json.loads(answer.read() or "{}")
        except urllib.error.HTTPError as fault:
            return json.load(fault)

    def run(self, graph: Graph) -> Case:
        """What comes of a graph: {"refused": words by node} by validation, {"failed": the node's words}, or what each
        output node shows and saves."""
        answer = self.post("/prompt", {"prompt": graph})
        if "prompt_id" not in answer:
            return {"refused": self.refusal(answer, graph)}
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and self.process.poll() is None:
            entry = self.get(f"/history/{answer['prompt_id']}").get(answer["prompt_id"])
            if entry is not None:
                self.post("/history", {"delete": [answer["prompt_id"]]})
                return self.result(entry, graph)
            time.sleep(0.01)
        raise RuntimeError(f"the prompt did not end:\n{json.dumps(graph)}\n{self.log()[-4000:]}")

    def refusal(self, answer: Case, graph: Graph) -> Case:
        errors = answer.get("node_errors") or {"prompt": {"errors": [answer["error"]]}}
        return {
            graph.get(node, {}).get("class_type", node): sorted(
                self.plain(f"{one['message']}: {one.get('details', '')}") for one in found["errors"]
            )
            for node, found in sorted(errors.items())
        }

    def result(self, entry: Case, graph: Graph) -> Case:
        for kind, data in entry["status"]["messages"]:
            if kind == "execution_error":
                return {"failed": f"{data['node_type']}: {self.plain(data['exception_message'])}"}
        return {
            f"{graph[node]['class_type']} {node}": {
                name: self.shown(name, one) for name, one in sorted(outputs.items())
            }
            for node, outputs in sorted(entry["outputs"].items())
        }

    def shown(self, name: str, values: Any) -> Any:
        if name not in ("images", "latents"):
            return [self.plain(one) if isinstance(one, str) else one for one in values]
        paths = [self.base / one["type"] / one["subfolder"] / one["filename"] for one in values]
        if name == "latents":
            return [self.latents(path) for path in paths]
        if paths[0].suffix == ".png":
            frames = [pixels(path) for path in paths]
            same = len({frame.shape for frame in frames}) == 1
            return [numbers(np.stack(frames))] if same else [numbers(frame) for frame in frames]
        import av

        with av.open(str(paths[0])) as video:
            return [numbers(np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]))]

    @staticmethod
    def latents(path: Path) -> Case:
        from safetensors.torch import load_file

        return numbers(load_file(path)["latent_tensor"].float().numpy())

    def plain(self, text: str) -> str:
        text = normal(text, self.base)
        text = re.sub(r"(?m)^ *(load|text|denoise|encode|decode|save|write|total|trim)\b.*\bN s\b.*\n?", "", text)
        return re.sub(r"_\d{5}_", "_N_", text).strip()


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def clear(base: Path) -> None:
    for folder in ("output", "temp"):
        shutil.rmtree(base / folder, ignore_errors=True)
        (base / folder).mkdir()
