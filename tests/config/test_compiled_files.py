"""Compiled kernels of an earlier process: used as it left them, or compiled again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wan_core.config import compiled_files
from wan_core.config.compile_cache import LIBRARY_CACHES
from wan_core.config.compiled_files import LIST, CompiledFiles

NAMES = tuple(LIBRARY_CACHES.values())
FILES = ("inductor/ab/x.so", "inductor/ab/x.cpp", "inductor/fx/cd/key/y", "triton/k1/a.cubin", "triton/k1/a.json",
         "triton/k2/b.cubin", "flash-attention/z.o", "flash-attention/w.o")  # fmt: skip


def there(root: Path) -> set[str]:
    """What a process that begins now uses; it lists it, and ends."""
    files = CompiledFiles(root, NAMES)
    files.check()
    found = files._there()
    files.note()
    compiled_files._held.pop().close()
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache folder with files that a run has listed."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 50)
    CompiledFiles(tmp_path, NAMES).note()
    return tmp_path


def two_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    content[-3] ^= 128
    path.write_bytes(content)


WAYS: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:9]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "two bytes": two_bytes,
    "swapped": lambda path: path.write_bytes(b"another kernel"),
}


@pytest.mark.parametrize("way", WAYS)
def test_damaged_files_are_not_used(root: Path, way: str) -> None:
    for name in FILES:
        WAYS[way](root / name)
        beside = {other for other in FILES if Path(other).parent == Path(name).parent}
        gone = beside if name.count("/") > 1 else {name}
        assert there(root) == set(FILES) - gone, name
        for other in gone:
            (root / other).parent.mkdir(parents=True, exist_ok=True)
            (root / other).write_bytes(other.encode() * 50)
        CompiledFiles(root, NAMES).note()


def test_files_that_no_run_has_listed_are_compiled_again(root: Path) -> None:
    """A process was killed while it wrote."""
    (root / "inductor/zz").mkdir()
    for name in ("inductor/zz/half.so", "triton/k2/half.json", "flash-attention/half.o"):
        (root / name).write_bytes(b"half")
    assert there(root) == set(FILES) - {"triton/k2/b.cubin"}
    assert there(root) == set(FILES) - {"triton/k2/b.cubin"}


@pytest.mark.parametrize("what", ["damaged", "missing", "folder", "pipe"])
def test_without_a_list_nothing_is_used(root: Path, what: str) -> None:
    listed = root / LIST
    if what == "damaged":
        two_bytes(listed)
    else:
        listed.unlink()
    if what == "folder":
        listed.mkdir()
    if what == "pipe":
        os.mkfifo(listed)
    assert not there(root)
    (root / "inductor").mkdir(exist_ok=True)
    (root / "inductor/again").write_bytes(b"compiled again")
    CompiledFiles(root, NAMES).note()
    assert there(root) == (set() if what in ("folder", "pipe") else {"inductor/again"})
