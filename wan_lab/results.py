"""Results as JSON files, as they are committed."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from wan_core import __version__
from wan_core.config.outputs import write_text
from wan_core.execution.report import device_name, installed
from wan_lab.commits import commit


def envelope(suite: str, device: torch.device, rows: list[dict[str, Any]], program: str = "wan_core") -> dict[str, Any]:
    """What every committed result says about itself. program: the module whose command line measured it."""
    return {
        "suite": suite,
        "command": shlex.join(["python", "-m", program, *sys.argv[1:]]),
        "commit": commit(),
        "version": __version__,
        "device": device_name(device),
        "versions": versions(device),
        "rows": rows,
    }


def versions(device: torch.device) -> dict[str, str | None]:
    """Python and the libraries that decide results and times on a device."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
        versions |= installed(
            ("triton", "flash-attn-4", "nvidia-cudnn-frontend", "transformer-engine", "comfy-kitchen")
        )
    return versions


def result_path(out: Path, suite: str, device: torch.device) -> Path:
    """`out` if it is a .json file, else a file in that folder, which is made, named after suite, device and date."""
    if out.suffix == ".json":
        return out
    out.mkdir(parents=True, exist_ok=True)
    short = device_name(device).split(",")[0].replace("NVIDIA ", "").replace(" ", "-").lower()
    return out / f"{suite}-{short}-{date.today():%Y%m%d}.json"


def write_result(result: dict[str, Any], path: Path) -> Path:
    """Write a result as JSON, beside and then renamed. Raises OSError."""
    return write_text(path, json.dumps(result, indent=1) + "\n")
