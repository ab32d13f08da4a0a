"""What compiling made, kept for the next process: on disk, for exactly what it was made for, and never trusted.

A file holds what `torch.compiler.save_cache_artifacts` gives, behind a checksum. Its name is a hash of everything that
the code depends on: torch, Triton, the device, this package's own sources and the options. A file that is damaged is
deleted, one of other versions is never looked at; either way compiling starts anew. Compilers that keep files of their
own (Inductor, Triton, flash-attn-4) are pointed to the same folder, unless the environment names another. Where
Inductor's still has what our file was unpacked to, the file is not unpacked again.

The folder is `$WANCORE_CACHE`, else `wancore` in the user's cache folder. What was used longest ago goes when it grows
beyond `LIMIT`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from wan_core.config.folders import cache_folder

log = logging.getLogger(__name__)
LIMIT = 2 << 30  # bytes on disk
MAGIC = b"wancore artifacts 1\n"
HEAD = len(MAGIC) + 32  # bytes before the payload: the checksum's are last
INDUCTOR, FLASH_ATTENTION = "TORCHINDUCTOR_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
OWN_CACHES = {  # of libraries that compile; values are folders in ours
    INDUCTOR: "inductor",
    "TRITON_CACHE_DIR": "triton",
    FLASH_ATTENTION: "flash-attention",
}
UNPACKED = ("fxgraph", "aotautograd")  # folders of Inductor's with the graphs
COMPILED = "compiled"  # our own files
FLASH_ATTENTION_KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # "1": it does


@dataclass
class Artifacts:
    """Of one combination of versions, device and options. `saved`: graphs that the file on disk has."""

    path: Path
    loaded: bool = False
    saved: int = 0

    @classmethod
    def open(cls, device: torch.device, options: dict[str, object]) -> Artifacts:
        """Point compilers to our folder and name the file for `options`."""
        point_compilers()
        return cls(cache_folder() / COMPILED / f"{artifact_key(device, options)}.bin")

    def load(self) -> str:
        """Give torch what is on disk, and say what came of it."""
        try:
            data = self.path.read_bytes()
            payload = unpack(data)
        except FileNotFoundError:
            return "compiling for the first time: what is compiled will be kept"
        except OSError as fault:
            return f"compiling anew: what was kept cannot be read ({fault.strerror})"
        try:
            if payload is None:
                raise ValueError("its checksum is wrong")
            if not self._is_unpacked(data):
                info = torch.compiler.load_cache_artifacts(payload)
                if info is None:
                    raise ValueError("torch does not know its form")
                self._mark_unpacked(data)
        except Exception as fault:  # noqa: BLE001  (unpickling a foreign blob may raise anything, and all are one: useless)
            log.warning("what was compiled before is damaged (%s): %s", fault, self.path)
            with suppress(OSError):
                self.path.unlink()
            return "compiling anew: what was kept is damaged"
        self.loaded = True
        with suppress(OSError):  # a folder that is another's, or read only
            os.utime(self.path)  # what is used stays longest
        return "what was compiled before is used again"

    def save(self, graphs: int, missed: int | None = None) -> bool:
        """Keep what this process compiled, `graphs` graphs so far, of which `missed` were found nowhere (None: not
        known); False where there is nothing new or no room. Never raises: a video that is made waits to be decoded."""
        if graphs <= self.saved:
            return False
        self.saved = graphs
        if self.loaded and missed == 0:
            return False
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            found = torch.compiler.save_cache_artifacts()
            if found is None:
                return False
            self.path.parent.mkdir(parents=True, exist_ok=True)
            data = pack(found[0])
            temporary.write_bytes(data)
            temporary.replace(self.path)
            self._mark_unpacked(data)
            prune(cache_folder())
        except Exception as fault:  # noqa: BLE001  (torch serialises what other libraries registered, too)
            log.warning("what was compiled could not be kept: %s", fault)
            return False
        finally:
            with suppress(OSError):  # where writing is forbidden, deleting what is not there is as well
                temporary.unlink(missing_ok=True)
        return True

    def _marks(self) -> list[Path]:
        """One file in each of the folders that torch unpacks to: what deletes one deletes the mark with it."""
        return [Path(os.environ[INDUCTOR]) / name / f"wancore-{self.path.stem}" for name in UNPACKED]

    def _is_unpacked(self, data: bytes) -> bool:
        """Whether torch's own folders have what the file `data` holds."""
        try:
            return all(mark.read_bytes() == data[:HEAD] for mark in self._marks())
        except OSError:
            return False

    def _mark_unpacked(self, data: bytes) -> None:
        marks = self._marks()
        if all(mark.parent.is_dir() for mark in marks):  # a torch that keeps them elsewhere unpacks each time
            with suppress(OSError):
                for mark in marks:
                    mark.write_bytes(data[:HEAD])


def point_compilers() -> None:
    """Have libraries that compile keep what they make, in our folder."""
    for variable in OWN_CACHES:
        _point(variable)
    point_flash_attention()


def point_flash_attention() -> None:
    """Have flash-attn-4 keep its kernels, which take it seconds. It asks for this when it is imported, never again, and
    cannot be imported where its folder cannot be made."""
    _point(FLASH_ATTENTION)
    try:
        Path(os.environ[FLASH_ATTENTION]).mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        log.info("flash-attn-4 compiles anew in each process: %s", fault)
        return
    os.environ.setdefault(FLASH_ATTENTION_KEEPS, "1")


def _point(variable: str) -> None:
    if not named(variable):
        os.environ[variable] = str(cache_folder() / OWN_CACHES[variable])


def named(variable: str) -> bool:
    """Whether the environment names a compiler's folder. torch puts its default there itself once its compiler is
    imported: that is nobody's wish."""
    value = os.environ.get(variable)
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    default = None if inductor is None or variable != INDUCTOR else inductor.default_cache_dir()
    return value is not None and value != default


def pack(payload: bytes) -> bytes:
    return MAGIC + hashlib.sha256(payload).digest() + payload


def unpack(data: bytes) -> bytes | None:
    """The payload; None if `data` is anything but what `pack` made."""
    payload = data[HEAD:]
    whole = data[: len(MAGIC)] == MAGIC and hashlib.sha256(payload).digest() == data[len(MAGIC) : HEAD]
    return payload if whole else None


def artifact_key(device: torch.device, options: dict[str, object]) -> str:
    """Everything that compiled code depends on. Options: what changes the code of a block."""
    cuda = device.type == "cuda"
    what = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version_info[:2],
        "packages": {name: _version(name) for name in ("triton", "flash-attn-4", "transformer-engine")},
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "capability": torch.cuda.get_device_capability(device) if cuda else None,
        "sources": sources_hash(),
        "options": options,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def sources_hash() -> str:
    """Of the sources that end up in compiled blocks."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in ("ops", "models/wan"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def prune(folder: Path, limit: int = LIMIT) -> None:
    """Delete what was used longest ago until our folders in `folder` hold at most `limit` bytes; other things in
    it stay. An entry is a file of ours, or one of the folders that a compiler keeps."""
    entries: list[tuple[float, int, Path]] = []
    for path in (path for name in (COMPILED, *OWN_CACHES.values()) for path in (folder / name).glob("*")):
        try:
            files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            stats = [file.stat() for file in files]
        except OSError:  # another process is writing or deleting it
            continue
        newest = max((max(s.st_mtime, s.st_atime) for s in stats), default=0.0)
        entries.append((newest, sum(s.st_size for s in stats), path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries, key=lambda entry: entry[0]):
        if total <= limit:
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
        total -= size
