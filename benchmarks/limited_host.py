"""Less host memory for a group of processes, and the bytes that a disk gave meanwhile.

The limit is a control group's, which counts mapped and cached files too; swapping is off for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30
ROOT = Path("/sys/fs/cgroup")
KINDS = ("anon", "rss", "kernel", "shmem", "unevictable", "mapped_file", "file_mapped")
GROUP = f"wancore-limited-{os.getpid()}"
RATE_BYTES, RATE_THREADS, RATE_PIECE = 4 * GIB, 4, 8 << 20


@dataclass
class Limit:
    """prefix: words before a command whose processes have the limit. how: in words."""

    prefix: list[str]
    how: str
    folder: Path | None = None
    kinds: dict[str, float] = field(default_factory=dict)

    def look(self) -> None:
        """Note how much memory of each kind the group has now, in `kinds` the most, GiB."""
        if self.folder is None:
            return
        with suppress(OSError):
            for line in (self.folder / "memory.stat").read_text().splitlines():
                name, size = line.split()
                if name in KINDS:
                    self.kinds[name] = max(self.kinds.get(name, 0.0), round(int(size) / GIB, 2))

    @property
    def peak_gib(self) -> float | None:
        """The most memory that the group had, cached files counted."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            with suppress(OSError, TypeError):
                return round(int((self.folder / name).read_text()) / GIB, 2)  # type: ignore[operator]
        return None


@contextmanager
def host_limit(gib: float | None) -> Iterator[Limit]:
    """None: no limit. Raises OSError where no group can be made."""
    if gib is None:
        yield Limit([], "none")
        return
    folder = ROOT / "memory" / GROUP if (ROOT / "memory").is_dir() else ROOT / GROUP  # version 1 or 2
    try:
        make_group(folder, int(gib * GIB))
        yield Limit(["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$0" "$@"'], "control group", folder)
    finally:
        remove_group(folder)


def make_group(folder: Path, limit: int) -> None:
    name = "memory.max" if folder.parent == ROOT else "memory.limit_in_bytes"
    with suppress(OSError):  # there in version 2 alone
        (ROOT / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir()
    (folder / name).write_text(str(limit))
    for name, value in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
        with suppress(OSError):
            (folder / name).write_text(value)


def remove_group(folder: Path) -> None:
    """What is still in it ends."""
    for _ in range(50):
        try:
            processes = (folder / "cgroup.procs").read_text().split()
        except OSError:
            return
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(int(process), 9)
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)


def drop_caches() -> bool:
    """Forget cached files; False where that is not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def disk_bytes(path: Path) -> int:
    """Bytes read so far from the disk that has `path`; from all disks where the system does not say which."""
    device = os.stat(path).st_dev
    found, own = 0, None
    for line in Path("/proc/diskstats").read_text().splitlines():
        major, minor, name, *numbers = line.split()
        read = int(numbers[2]) * 512
        if (int(major), int(minor)) == (os.major(device), os.minor(device)):
            own = read
        if (Path("/sys/block") / name).exists() and not name.startswith(("loop", "ram", "dm-", "zram")):
            found += read
    return found if own is None else own


def disk_rate(path: Path, most: int = RATE_BYTES) -> float:
    """GB/s at which threads read the beginning of a file that is not cached."""
    drop_caches()
    size = min(most, path.stat().st_size)
    begin = time.perf_counter()
    with path.open("rb") as file, ThreadPoolExecutor(RATE_THREADS) as pool:
        buffers = [bytearray(RATE_PIECE) for _ in range(RATE_THREADS)]

        def read(thread: int) -> None:
            for at in range(thread * RATE_PIECE, size, RATE_THREADS * RATE_PIECE):
                os.preadv(file.fileno(), [buffers[thread]], at)

        list(pool.map(read, range(RATE_THREADS)))
    return float(f"{size / (time.perf_counter() - begin) / 1e9:.3g}")
