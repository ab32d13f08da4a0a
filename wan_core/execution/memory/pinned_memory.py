"""Host memory that a GPU copies from while it computes."""

from __future__ import annotations

import logging
import mmap
import sys
from typing import Any

import torch

log = logging.getLogger(__name__)
HUGE = 2 << 20  # bytes of a large page, which is pinned and read faster, where the system has them


def _cuda() -> Any:
    return torch.cuda.cudart()


class PinnedMemory:
    """`bytes`: uint8 [nbytes] in host memory, pinned by `lock`. Views stay valid after this object is gone, but are not
    pinned any more.

    torch's own pinned memory comes in powers of two, which would cost a model of 14.3 GB another 2 GB. Here pages are
    mapped, filled by threads, and only then pinned: pinning pages that exist is much faster than pinning new ones."""

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
        """Pin it for all GPUs; False where the system refuses: then copies to the device wait for the host."""
        if not self.locked and len(self.bytes):
            fault = int(_cuda().cudaHostRegister(self.bytes.data_ptr(), len(self.bytes), 1))  # 1: for all GPUs
            self.locked = fault == 0
            if fault:
                log.warning("%d bytes of host memory could not be pinned (CUDA error %d)", len(self.bytes), fault)
        return self.locked

    def __del__(self) -> None:
        if getattr(self, "locked", False) and torch is not None and torch.cuda.is_initialized():
            _cuda().cudaHostUnregister(self.bytes.data_ptr())
            self.locked = False
