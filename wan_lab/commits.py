"""Which commit this is, for results that say what measured them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ARCHIVED = Path(__file__).with_name("COMMIT")  # `git archive` writes the commit into it


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of the checkout that contains `folder` (by default, this one), or of the archive that this module came
    in; None elsewhere."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=folder
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        said = ARCHIVED.read_text(encoding="utf-8").strip() if ARCHIVED.is_file() else ""
        return said if said.isalnum() and folder == ARCHIVED.parent else None
