"""A real ComfyUI for tests. Where it is: COMFYUI_PATH or ~/comfy/ComfyUI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.comfyui import QUIET, Client, ComfyUI, Graph, Refused, Run, make_base, python_of

__all__ = [
    "QUIET",
    "Client",
    "ComfyUI",
    "Graph",
    "Refused",
    "Run",
    "find_comfyui",
    "find_newer_comfyui",
    "make_base",
    "python_of",
]


def find_comfyui(default: str = "~/comfy/ComfyUI", variable: str = "COMFYUI_PATH") -> Path:
    """The checkout, or skip the test."""
    path = Path(os.environ.get(variable, default)).expanduser()
    if not (path / "main.py").is_file():
        pytest.skip(f"no ComfyUI at {path}: set {variable}")
    return path


def find_newer_comfyui() -> Path:
    """A checkout of ComfyUI 0.33 or newer, which has Animate-2 and tells which file a MODEL is of; or skip the test."""
    checkout = find_comfyui()
    if not (checkout / "comfy" / "ldm" / "wan" / "model_animate2.py").is_file():
        pytest.skip("needs ComfyUI 0.33 or newer")
    return checkout
