"""Compiled kernels are executed by the next process: they are kept only where nobody else can put a file."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wan_core.cli.doctor import examine, text
from wan_core.config import compile_cache
from wan_core.config.compile_cache import (
    FLASH_ATTENTION_ENABLED,
    LIBRARY_CACHES,
    cache_folder,
    make_private,
    set_compile_caches,
    why_not_kept,
    why_not_private,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists instead of modes")
TRITON = "TRITON_CACHE_DIR"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder in which no cache exists, and no variable that a user has set."""
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("WANCORE_CACHE", raising=False)
    for name in (*LIBRARY_CACHES, FLASH_ATTENTION_ENABLED):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    compile_cache._temporary.cache_clear()
    return home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_new_folders_are_private_under_any_umask(home: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        set_compile_caches()
    finally:
        os.umask(before)
    folder = home / ".cache" / "wancore"
    assert [mode(place) for place in (folder.parent, folder, folder / "flash-attention")] == [0o700] * 3
    assert os.environ[TRITON] == str(folder / "triton") and why_not_kept() is None


BAD: dict[str, Callable[[Path], Path]] = {
    "others may write": lambda home: home / ".cache" / "wancore",
    "to the parent": lambda home: home / ".cache",
    "to one library's folder": lambda home: home / ".cache" / "wancore" / "triton",
}


@pytest.mark.parametrize("bits", [0o020, 0o002], ids=["group", "others"])
@pytest.mark.parametrize("place", BAD)
def test_a_folder_that_others_can_write_is_not_used(
    home: Path, place: str, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = home / ".cache" / "wancore"
    make_private(folder / "triton")
    bad = BAD[place](home)
    bad.chmod(0o700 | bits)
    with caplog.at_level(logging.WARNING):
        set_compile_caches()
    used = {Path(os.environ[name]).parent for name in LIBRARY_CACHES}
    assert len(used) == 1 and folder not in used and mode(used.pop()) == 0o700
    assert caplog.text.count("compiled kernels are not kept") == 1
    assert f"chmod go-w '{bad}'" in caplog.text and "WANCORE_CACHE" in caplog.text


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_private(home / ".cache" / "wancore")
    os.chown(home / ".cache" / "wancore", 12345, -1)
    with caplog.at_level(logging.WARNING):
        set_compile_caches()
    assert not os.environ[TRITON].startswith(str(home)) and "belongs to another user" in caplog.text


def test_parents_elsewhere_may_be_shared_if_entries_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("WANCORE_CACHE", str(shared / "mine"))
    shared.chmod(0o1777)
    assert why_not_private(cache_folder()) is None
    shared.chmod(0o777)
    assert f"chmod go-w '{shared}'" in (why_not_private(cache_folder()) or "")


def test_the_doctor_says_so(home: Path) -> None:
    folder = home / ".cache" / "wancore"
    report = examine("cpu")
    assert report["compile cache"] == {"folder": str(folder), "why_not": None} and not folder.exists()
    assert f"compile cache            {folder}" in text(report)
    make_private(folder)
    folder.chmod(0o777)
    assert f"compile cache            not used: other users can write to {folder}" in text(examine("cpu"))
