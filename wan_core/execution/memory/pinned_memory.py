"""Host memory that a GPU reads at full speed while it computes: page-locked, of exactly the size that was asked for.

torch's own pinned memory comes in powers of two, which would cost a model of 14.3 GB another 2 GB. Here pages are
mapped, filled by threads, and only then locked: locking pages that exist is much faster than locking new ones.
"""

from __future__ import annotations

import logging
import mmap
import sys
from typing import Any

import torch

log = logging.getLogger(__name__)
HUGE = 2 << 20  # pages of this size are locked and read faster, where the system has them


def available_bytes() -> int | None:
    """Host memory that can be had without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            found = next((line for line in file if line.startswith("MemAvailable:")), None)
    except OSError:
        return None
    return None if found is None else int(found.split()[1]) * 1024


def _cuda() -> Any:
    """The CUDA runtime as torch shows it."""
    return torch.cuda.cudart()


class Pages:
    """`bytes`: uint8 [nbytes] in host memory. Views of it stay valid after this object is gone, unlocked."""

    def __init__(self, nbytes: int) -> None:
        self.locked = False
        if sys.platform == "linux" and nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            pages = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
            if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                try:
                    pages.madvise(mmap.MADV_HUGEPAGE)
                except OSError:  # a kernel without them
                    log.info("no huge pages here")
            self.bytes = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
        else:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8)

    def lock(self) -> bool:
        """Lock them for all GPUs; False where the system refuses, and copies wait for the host then."""
        if not self.locked and len(self.bytes):
            fault = int(_cuda().cudaHostRegister(self.bytes.data_ptr(), len(self.bytes), 1))  # 1: for all GPUs
            self.locked = fault == 0
            if fault:
                log.warning("%d bytes of host memory could not be locked (CUDA error %d)", len(self.bytes), fault)
        return self.locked

    def __del__(self) -> None:
        if getattr(self, "locked", False) and torch is not None and torch.cuda.is_initialized():
            _cuda().cudaHostUnregister(self.bytes.data_ptr())
            self.locked = False
