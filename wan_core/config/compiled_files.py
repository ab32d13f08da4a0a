"""Compiled kernels that an earlier process left are executed only if they are as it left them.

The libraries that compile verify nothing. So a file in the cache folder lists the checksum of each of theirs. A process
checks them before it compiles for the first time, and adds what is new after each run. A file is removed and compiled
again if it does not fit, or if no run has listed it: its process was killed, perhaps while it wrote. Its folder goes
with it, because a kernel of Triton is a folder.

Each process holds a lock of the folder while it runs, so files that another one is writing are left alone. Windows has
no such locks: there, files that are not listed stay.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from wan_core.config.checks import OptionError, check_file_size
from wan_core.config.durable import SEAL, UNSEALED, check_seal
from wan_core.config.limits import MAX_JSON
from wan_core.config.outputs import written_sealed

log = logging.getLogger(__name__)
LIST = "compiled-files.json"
_held: list[BinaryIO] = []  # locks of this process, as long as it runs


class CompiledFiles:
    """The files of libraries below `root`, in its folders `names`."""

    def __init__(self, root: Path, names: Iterable[str]) -> None:
        self.root, self.names = root, tuple(names)

    def check(self) -> None:
        """Remove what cannot be trusted. Call it once, before any of them is used."""
        alone = self._hold()
        listed, there = self._listed(), self._there()
        damaged = {name for name in there if name in listed and _digest(self.root / name) != listed[name]}
        unknown = {name for name in there if name not in listed} if alone else set()
        if damaged:
            log.warning("%d compiled files in %s are damaged, and are compiled again", len(damaged), self.root)
        for name in damaged | unknown:
            self._remove(self.root / name)

    def note(self) -> None:
        with suppress(OSError), self._changing():  # a full disk: the next process compiles again
            listed = self._listed()
            there = self._there()
            new = {name: digest for name in there if name not in listed and (digest := _digest(self.root / name))}
            kept = {name: digest for name, digest in listed.items() if name in there}
            if kept | new != listed:
                self._write(kept | new)

    def _remove(self, file: Path) -> None:
        with suppress(OSError):  # it went with another one
            file.unlink()
        if file.parent.parent != self.root:
            shutil.rmtree(file.parent, ignore_errors=True)

    def _there(self) -> set[str]:
        folders = (os.walk(self.root / name) for name in self.names)
        files = (Path(folder, file) for walk in folders for folder, _, names in walk for file in names)
        return {str(file.relative_to(self.root)) for file in files}

    def _listed(self) -> Mapping[str, str]:
        """Name -> checksum; nothing where the list is damaged itself."""
        path = self.root / LIST
        try:
            check_file_size(path, MAX_JSON)
            return json.loads(path.read_text(encoding="utf-8"))["files"] if check_seal(path) else {}
        except (OptionError, OSError):
            return {}

    def _write(self, files: Mapping[str, str]) -> None:
        with written_sealed(self.root / LIST) as temporary:
            temporary.write_text(json.dumps({SEAL: UNSEALED, "files": files}, indent=0), encoding="utf-8")

    def _hold(self) -> bool:
        """Hold the lock of a process that uses the folder. Returns whether no other one does."""
        if sys.platform == "win32":
            return False
        import fcntl

        try:
            file = (self.root / "in-use").open("a+b")
            _held.append(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                alone = False
            fcntl.flock(file, fcntl.LOCK_SH)  # waits for one that is checking
        except OSError as fault:  # a file system without locks
            log.info("files that no run has listed stay in %s: %s", self.root, fault)
            return False
        return alone

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if sys.platform == "win32":
            yield
            return
        import fcntl

        with (self.root / "listing").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _digest(path: Path) -> str | None:
    """None for a file that is gone, or no file."""
    digest = hashlib.sha256()
    with suppress(OSError):
        if path.is_file():
            digest.update(path.read_bytes())
            return digest.hexdigest()
    return None
