"""A real ComfyUI for tests. Where it is: COMFYUI_PATH or ~/comfy/ComfyUI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.comfyui import QUIET, Client, ComfyUI, Graph, Refused, Run, make_base, python_of

__all__ = ["QUIET", "Client", "ComfyUI", "Graph", "Refused", "Run", "find_comfyui", "make_base", "python_of"]


def find_comfyui(default: str = "~/comfy/ComfyUI", variable: str = "COMFYUI_PATH") -> Path:
    """The checkout, or skip the test."""
    path = Path(os.environ.get(variable, default)).expanduser()
    if not (path / "main.py").is_file():
        pytest.skip(f"no ComfyUI at {path}: set {variable}")
    return path
