"""A real ComfyUI for tests. Where it is: COMFYUI_PATH or ~/comfy/ComfyUI."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.comfyui import QUIET, Client, ComfyUI, Graph, Refused, Run, find_checkout, make_base, python_of
from wan_core.config import OptionError

__all__ = [
    "QUIET",
    "Client",
    "ComfyUI",
    "Graph",
    "Refused",
    "Run",
    "act_in_step",
    "find_comfyui",
    "find_newer_comfyui",
    "interrupted",
    "make_base",
    "printed_by",
    "python_of",
    "saved_latents",
    "serving",
]


def find_comfyui(default: str = "~/comfy/ComfyUI", variable: str = "COMFYUI_PATH") -> Path:
    """The checkout, or skip the test."""
    try:
        return find_checkout(Path(os.environ.get(variable, default)).expanduser())
    except OptionError as absent:
        pytest.skip(f"{absent} ({variable})")


def serving(base: Path, *arguments: Any, **options: Any) -> Iterator[ComfyUI]:
    """A server on `base`, for a fixture: `yield from serving(base)`."""
    server = ComfyUI(find_comfyui(), base, *arguments, **options)
    try:
        yield server
    finally:
        server.stop()


def saved_latents(comfy: ComfyUI, graph: Graph, node: str = "kept") -> Tensor:
    """Run the graph: what its node SaveLatent wrote."""
    run = comfy.run(graph)
    assert run.ok, run.status
    return load_file(comfy.output_file(run, node))["latent_tensor"]


def act_in_step(comfy: ComfyUI, graph: Graph, act: Callable[[], object]) -> tuple[Run, int]:
    """Run a graph, and call `act` in the third step of its sampler. The run, and the last step that it reached."""
    client, reached = Client(comfy.port), 0
    prompt = comfy.queue(graph, client.name)
    for event in client.events():
        if event["type"] == "progress" and event["data"]["node"] == "sampler":
            reached = event["data"]["value"]
            if reached == 3:
                act()
        elif event["type"] in ("execution_interrupted", "execution_error", "execution_success"):
            break
    client.close()
    return comfy.wait(prompt), reached


def interrupted(comfy: ComfyUI, graph: Graph) -> int:
    """The last step that the sampler of a graph reached, which is interrupted in its third."""
    run, reached = act_in_step(comfy, graph, lambda: comfy.post("/interrupt", {}))
    assert not run.ok and run.message("execution_interrupted")["node_id"] == "sampler"
    return reached


def printed_by(script: str, checkout: Path, *arguments: str) -> Any:
    """The JSON on the last line that `tests/nodes/SCRIPT` prints in a process of that ComfyUI."""
    command = [python_of(checkout), str(Path(__file__).with_name("nodes") / script), str(checkout), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **QUIET}, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def find_newer_comfyui() -> Path:
    """A checkout of ComfyUI 0.33 or newer, which has Animate-2 and tells which file a MODEL is of; or skip the test."""
    checkout = find_comfyui()
    if not (checkout / "comfy" / "ldm" / "wan" / "model_animate2.py").is_file():
        pytest.skip("needs ComfyUI 0.33 or newer")
    return checkout
