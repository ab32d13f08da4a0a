"""Results as they are committed, and as a table."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from wan_core.report import device_name


def envelope(suite: str, device: torch.device, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What every committed result says about itself."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    if any(row["name"] == "diffusers" for row in rows):
        import diffusers

        versions["diffusers"] = diffusers.__version__
    return {
        "suite": suite,
        "command": " ".join(["python -m wan_core", *sys.argv[1:]]),
        "commit": commit(),
        "device": device_name(device),
        "versions": versions,
        "rows": rows,
    }


def commit() -> str | None:
    """The commit that is measured, where the code runs from a checkout."""
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


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people, a column for each number that any row has."""
    columns = {
        "seconds": ".4f",
        "spread": ".4f",
        "seconds_per_step": ".4f",
        "peak_gib": ".2f",
        "ratio": ".3f",
        "error": ".2g",
    }
    shown = [c for c in columns if any(c in r for r in rows)]
    lines = [f"{'size':<14}  {'name':<18}" + "".join(f"{c:>17}" for c in shown)]
    for row in rows:
        numbers = "".join(f"{format(row[c], columns[c]) if c in row else '':>17}" for c in shown)
        lines.append(f"{row['size']:<14}  {row['name']:<18}{numbers}")
    return "\n".join(lines)
