"""Result files of measurements, and their rows as a table."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import peer_versions
from wan_core.execution.report import device_name

Row = dict[str, Any]
# Errors of third-party kernels on untested machines. The row records the error, and the other rows are measured.
FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError, OSError)


def guarded(name: str, size: str, reason: str | None, make: Callable[[], Row]) -> Row:
    """A row with the numbers of `make`; with `reason` if it is given, without calling `make`; or with its error."""
    row: Row = {"name": name, "size": size}
    if reason is not None:
        return row | {"why_not": reason}
    try:
        return row | make()
    except FAULTS as fault:
        traceback.print_exc(file=sys.stderr)
        return row | {"failed": f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0][:300]}"}


def envelope(suite: str, device: torch.device, rows: list[Row]) -> dict[str, Any]:
    """A result with its rows, command, commit, device and versions."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
        versions |= installed(
            ("triton", "flash-attn-4", "nvidia-cudnn-frontend", "transformer-engine", "comfy-kitchen")
        )
    versions |= peer_versions({row["name"] for row in rows})
    return {
        "suite": suite,
        "command": " ".join(["python -m wan_core", *sys.argv[1:]]),
        "commit": commit(),
        "device": device_name(device),
        "versions": versions,
        "rows": rows,
    }


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version, for the installed ones."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def commit() -> str | None:
    """The measured commit; None if the code does not run from a git checkout."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_result(result: dict[str, Any], out: Path | None, device: torch.device) -> Path | None:
    if out is None:
        return None
    if out.suffix != ".json":
        out.mkdir(parents=True, exist_ok=True)
        short = result["device"].split(",")[0].replace("NVIDIA ", "").replace(" ", "-").lower()
        out = out / f"{result['suite']}-{short}-{date.today():%Y%m%d}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    return out


COLUMNS = {  # numeric columns and their format
    "seconds": ".4f",
    "spread": ".4f",
    "seconds_per_step": ".4f",
    "ratio": ".3f",
    "times_diffusers": ".3f",
    "moved_gib": ".2f",
    "exchange_share": ".3f",
    "tflops": ".1f",
    "of_peak": ".3f",
    "peak_gib": ".2f",
    "weights_gib": ".2f",
    "activation_gib": ".2f",
    "load_seconds": ".2f",
    "file_gib": ".2f",
    "widen_ms": ".1f",
    "widen_torch_ms": ".1f",
    "compile_seconds": ".1f",
    "compilations": "d",
    "error": ".2g",
    "psnr": ".2f",
    "latent_psnr": ".2f",
    "ssim": ".4f",
    "captions_true": ".3f",
    "switch_ms": ".1f",
    "step_spread": ".4f",
    "share": ".4f",
    "forwards": "d",
    "estimate": ".2f",
    "off": "+.4f",
    "gb_s": ".1f",
    "host_gib": ".2f",
    "slowdown": ".3f",
    "planned_gib": ".2f",
    "plan_error": "+.3f",
    "resident_blocks": "d",
    "device_growth_mib": ".2f",
    "host_growth_mib": ".1f",
}


def table(rows: list[Row]) -> str:
    """The rows as text, with the columns of `COLUMNS` that any row has; rows without numbers show their reason."""
    shown = [column for column in COLUMNS if any(column in row for row in rows)]
    width = max((len(row["name"]) for row in rows), default=0)
    widths = [max(9, len(column)) + 2 for column in shown]
    heads = "".join(f"{column:>{size}}" for column, size in zip(shown, widths, strict=True))
    lines = [f"{'size':<14}  {'name':<{width}}{heads}"]
    for row in rows:
        texts = [format(row[column], COLUMNS[column]) if column in row else "" for column in shown]
        numbers = "".join(f"{text:>{size}}" for text, size in zip(texts, widths, strict=True))
        reason = row.get("why_not") or row.get("failed")
        lines.append(f"{row['size']:<14}  {row['name']:<{width}}" + (f"  {reason}" if reason else numbers))
    return "\n".join(lines)
