"""What Python compiles is kept where Python keeps it nowhere, and nothing else of a process is touched."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wan_core.config import imports
from wan_core.config.imports import FORBIDS, PREFIX

SOURCE = "value = 1\n"
CODE = """
import gc, sys
from wan_core.config.imports import quicken
quicken()
import torch
print(torch.__cached__, sys.dont_write_bytecode, gc.get_threshold()[0])
"""
CHILD = """
import subprocess, sys
from wan_core.config.imports import quicken
quicken()
subprocess.run([sys.executable, "-c", "import torch; print(torch.__cached__)"])
"""


@pytest.fixture
def torch_folder(tmp_path: Path) -> Path:
    """Where something stands that is called torch."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SOURCE)
    about = tmp_path / "site" / "torch-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    return package


def start(torch_folder: Path, code: str = CODE, **environment: str) -> list[str]:
    path = f"{torch_folder.parent}{os.pathsep}{Path.cwd()}"
    inherited = {k: v for k, v in os.environ.items() if k not in (FORBIDS, PREFIX)}
    inherited |= {"PYTHONPATH": path, "WANCORE_CACHE": str(torch_folder.parents[1] / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=inherited | environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_it_is_kept_where_python_may_not(torch_folder: Path) -> None:
    """And found by the next start, which compiles nothing. Processes that it starts keep theirs, too."""
    kept, forbidden, threshold = start(torch_folder, **{FORBIDS: "1"})
    file = Path(kept)
    assert file.is_file() and not (torch_folder / "__pycache__").exists()
    folder = torch_folder.parents[1] / "cache" / "bytecode"
    assert file.relative_to(folder).parts[0].startswith(sys.implementation.cache_tag)
    assert forbidden == "False" and int(threshold) == imports.SELDOM[0]
    written = file.stat().st_mtime_ns
    assert start(torch_folder, **{FORBIDS: "1"})[0] == kept and file.stat().st_mtime_ns == written
    file.unlink()
    assert start(torch_folder, CHILD, **{FORBIDS: "1"}) == [kept] and file.is_file()


def test_garbage_is_looked_for_as_before_once_all_is_imported(torch_folder: Path) -> None:
    code = """
import gc
from wan_core import imports
before = gc.get_threshold()
imports.done()  # of a process of another's
print(gc.get_threshold() == before, gc.get_freeze_count())
imports.quicken()
print(gc.get_threshold() == before)
imports.done()
print(gc.get_threshold() == before, gc.get_freeze_count() > 1000)
"""
    assert start(torch_folder, code) == ["True", "0", "False", "True", "True"]


def test_it_is_left_to_python_where_it_may(torch_folder: Path) -> None:
    beside = torch_folder / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    assert start(torch_folder)[0] == str(beside) and beside.is_file()
    assert start(torch_folder, **{FORBIDS: "1"})[:2] == [str(beside), "True"]  # it was there before that was forbidden


def test_it_is_kept_where_the_folder_cannot_be_written(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("WANCORE_CACHE", str(torch_folder.parents[1] / "cache"))
    monkeypatch.setattr(imports.importlib.util, "find_spec", lambda _: _Spec(torch_folder / "__init__.py"))
    assert imports.environment() == {}
    monkeypatch.setattr(imports.os, "access", lambda *_: False)
    assert set(imports.environment()) == {PREFIX, FORBIDS}
    monkeypatch.setattr(imports.os, "stat", lambda *_: (_ for _ in ()).throw(PermissionError))
    assert imports.environment() == {}


def test_a_drive_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports.os.path, "exists", lambda _: False)
    assert imports._may_be_written(Path("/a/b")) == os.access("/", os.W_OK)


def test_another_version_of_anything_has_another_folder(torch_folder: Path) -> None:
    """Python takes what it kept for that of any source of the same place, date and length. What was not used for a
    month goes."""
    first = start(torch_folder, **{FORBIDS: "1"})[0]
    (torch_folder.parent / "numpy-1.2.dist-info").mkdir()
    second = start(torch_folder, **{FORBIDS: "1"})[0]
    assert first != second and Path(first).is_file() and Path(second).is_file()
    folder = torch_folder.parents[1] / "cache" / "bytecode"
    old = folder / Path(first).relative_to(folder).parts[0]
    os.utime(old / imports.USED, (1e9, 1e9))
    (torch_folder.parent / "numpy-1.2.dist-info").rename(torch_folder.parent / "numpy-1.3.dist-info")
    start(torch_folder, **{FORBIDS: "1"})
    assert not old.exists() and Path(second).is_file()


def test_where_neither_can_be_written_nothing_is_said(torch_folder: Path) -> None:
    """A prefix would hide what lies beside other sources."""
    (torch_folder.parents[1] / "cache").write_text("a file")
    assert start(torch_folder, **{FORBIDS: "1"})[1] == "True"


@pytest.mark.parametrize("date", [0, 1, 315532800])
def test_sources_without_a_date_are_not_told_apart(torch_folder: Path, date: int) -> None:
    """Some builds date all alike."""
    os.utime(torch_folder / "__init__.py", (date, date))
    assert start(torch_folder, **{FORBIDS: "1"})[1] == "True"
    assert not (torch_folder.parents[1] / "cache").exists()


def test_a_program_that_has_imported_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "environment", lambda: {PREFIX: "/nowhere", FORBIDS: ""})
    before = sys.pycache_prefix, sys.dont_write_bytecode, gc.get_threshold(), dict(os.environ)
    imports.quicken()
    assert before == (sys.pycache_prefix, sys.dont_write_bytecode, gc.get_threshold(), dict(os.environ))


class _Spec:
    def __init__(self, origin: Path) -> None:
        self.origin = str(origin)
