"""Which file a tensor's values lie in, where a file is mapped, and where in it."""

from __future__ import annotations

import mmap
import os
import sys
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

MAPS, PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Mapped:
    """Addresses begin..end show `path` from byte `at` on."""

    begin: int
    end: int
    path: str
    at: int


class MappedFiles:
    """The files that this process maps, as they are when this is made; none on systems that do not list them."""

    def __init__(self) -> None:
        self.mapped: list[Mapped] = []
        if sys.platform == "linux" and MAPS.exists() and PAGES.exists():
            lines = MAPS.read_text(errors="surrogateescape").splitlines()
            self.mapped = sorted((one for line in lines if (one := _parse(line))), key=lambda one: one.begin)
        self.begins = [one.begin for one in self.mapped]

    def find(self, tensor: Tensor) -> tuple[str, int] | None:
        """File and offset of the tensor's bytes; None where no one file has all of them."""
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return None
        begin = tensor.data_ptr()
        index = bisect_right(self.begins, begin) - 1
        if index < 0 or begin + tensor.nbytes > self.mapped[index].end or changed_pages(tensor):
            return None
        one = self.mapped[index]
        return one.path, one.at + begin - one.begin


def changed_pages(tensor: Tensor) -> bool:
    """Whether any of the tensor's memory was written since it was mapped: its pages are this process's own then, and no
    longer the file's."""
    first, last = tensor.data_ptr() // PAGE, (tensor.data_ptr() + tensor.nbytes - 1) // PAGE
    with PAGES.open("rb", buffering=0) as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first + 1)), np.uint64)
    present, swapped, of_file = (entries >> np.uint64(bit) & np.uint64(1) for bit in (63, 62, 61))
    return len(entries) <= last - first or bool((swapped | present & ~of_file & np.uint64(1)).any())


def _parse(line: str) -> Mapped | None:
    """`begin-end rights offset major:minor inode path`. None for memory without a file, and for a file that has been
    replaced or removed since it was mapped."""
    fields = line.split(maxsplit=5)
    if len(fields) < 6 or not fields[5].startswith("/"):
        return None
    begin, end = (int(number, 16) for number in fields[0].split("-"))
    try:
        status = os.stat(fields[5])
    except OSError:
        return None
    major, minor = (int(number, 16) for number in fields[3].split(":"))
    if int(fields[4]) != status.st_ino or (os.major(status.st_dev), os.minor(status.st_dev)) != (major, minor):
        return None
    return Mapped(begin, end, fields[5], int(fields[2], 16))
