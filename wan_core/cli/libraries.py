"""The libraries that the engine uses: what for, and how to install them. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Mapping
from typing import Any

from wan_core.config.printing import command, module

# distribution -> (what it is for, how to install it); None: required
LIBRARIES: dict[str, tuple[str, str | None]] = {
    "torch": ("everything, from 2.6 on", None),
    "numpy": ("frames", None),
    "sentencepiece": ("tokenizer", None),
    "av": ("writing and reading video", None),
    "Pillow": ("reading images", None),
    "safetensors": ("reading and writing model files", None),
    "flash-attn-4": ("attention on Hopper and Blackwell", "pip install --pre flash-attn-4"),
    "flash-attn": ("attention on Ampere and newer", "pip install --no-build-isolation flash-attn"),
    "sageattention": ("int8 attention", "see github.com/thu-ml/SageAttention"),
    "nvidia-cudnn-frontend": ("FP8 attention", "pip install nvidia-cudnn-frontend nvidia-cutlass-dsl"),
    "transformer-engine": (
        "FP8 linears and attention",
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
    "ray": ("GPUs of several machines (docs/cluster.md), from 2.60 on", "pip install 'ray>=2.60'"),
    "comfy-kitchen": ("INT8 matmuls and attention; NVFP4 and MXFP8 on Blackwell", "pip install comfy-kitchen"),
}
MODULES = {"Pillow": "PIL"}  # of distributions that are imported by another name
TORCH = "https://pytorch.org/get-started/locally"


def install_command(name: str) -> str:
    """How to install a required library into the Python that runs this."""
    install = module("pip", "install", name)
    if name == "torch":
        index = " --index-url https://download.pytorch.org/whl/cu130" if sys.platform == "win32" else ""
        return f"{install}{index} (2.6 or newer; the build for each GPU: {TORCH})"
    return install


def missing() -> list[str]:
    required = [name for name, (_, install) in LIBRARIES.items() if install is None]
    return [name for name in required if importlib.util.find_spec(MODULES.get(name, name)) is None]


def missing_library(module: str) -> str | None:
    """What to do where a required library is not installed, by the name of its module; None for other modules."""
    distribution = next((name for name in LIBRARIES if MODULES.get(name, name) == module.partition(".")[0]), None)
    if distribution is None or distribution not in missing():
        return None
    install, doctor = install_command(distribution), command("doctor")
    return f"{distribution} is not installed: {install}. `{doctor}` lists what else is missing"


def python() -> dict[str, Any]:
    return {"python": platform.python_version(), "platform": platform.platform()}


def without_torch() -> dict[str, Any]:
    """What the doctor finds where required libraries are missing, as plain data: {"system", "libraries", "install"}."""
    return {
        "system": python(),
        "libraries": {name: library(name) for name in LIBRARIES},
        "install": [install_command(name) for name in missing()],
    }


def library(name: str) -> dict[str, Any]:
    """{"for", "version", "note"} of a distribution; version None where it is not installed."""
    purpose, install = LIBRARIES[name]
    try:
        return {"for": purpose, "version": importlib.metadata.version(name), "note": None}
    except importlib.metadata.PackageNotFoundError:
        return {"for": purpose, "version": None, "note": install or f"required: {install_command(name)}"}


def line(name: str, state: object) -> str:
    return f"  {name:<22} {state}"


def library_lines(findings: Mapping[str, Any]) -> list[str]:
    lines = ["system", *(line(key, value) for key, value in findings["system"].items()), "libraries"]
    for name, one in findings["libraries"].items():
        note = f" ({one['note']})" if one["note"] else ""
        lines.append(line(name, f"{one['version'] or 'not installed':<16} {one['for']}{note}"))
    return lines


def text(findings: Mapping[str, Any]) -> str:
    advice = "not tested, because required libraries are missing. Install them first:"
    return "\n".join([*library_lines(findings), advice, *(f"  {install}" for install in findings["install"])])
