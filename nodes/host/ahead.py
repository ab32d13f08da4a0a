"""Weights that are read in a thread before they are needed.

Only where memory is plentiful: nothing leaves the device for them, and enough stays free for whatever runs meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch
from torch import nn

from wan_core.checkpoint.errors import CheckpointError
from wan_core.execution.memory.residency import tensors_of

log = logging.getLogger("WanCore")
AHEAD_ON = ("cuda",)  # types of device
RESERVE = 32 * 2**30  # bytes that stay free: a text encoder, activations, a VAE at work
POLL = 0.05  # seconds between two looks at whether the user interrupts
FAULTS = (CheckpointError, OSError, RuntimeError, ValueError)
"""What reading raises. Whoever needs the weights then reads them again, and raises it where the user sees it."""


class Dropped(Exception):
    """Raised between two tensors where nobody wants the rest."""


class Ahead:
    """A module that is being read. read: does it, and calls what it is given with every number of bytes."""

    def __init__(self, name: str, read: Callable[[Callable[[int], None]], nn.Module]) -> None:
        self.module: nn.Module | None = None
        self.dropped = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(name, read), name="wancore-ahead", daemon=True)
        self.thread.start()

    def take(self, poll: Callable[[], None]) -> nn.Module | None:
        """The module when it is read; None if that failed. poll: may raise meanwhile."""
        while self.thread.is_alive():
            poll()
            self.thread.join(POLL)
        return self.module

    def drop(self) -> None:
        """Stop, and free what was read."""
        self.dropped.set()
        self.thread.join()
        for tensor in tensors_of(self.module).values() if self.module is not None else ():
            tensor.data = tensor.new_empty(0)
        self.module = None

    def _run(self, name: str, read: Callable[[Callable[[int], None]], nn.Module]) -> None:
        try:
            self.module = read(self._check)
        except Dropped:
            log.info("WanCore stopped reading the %s ahead", name)
        except FAULTS as fault:
            log.info("WanCore could not read the %s ahead: %s", name, fault)

    def _check(self, _: int) -> None:
        if self.dropped.is_set():
            raise Dropped


def fits(free: int, sizes: int, device: torch.device) -> bool:
    """Whether `sizes` bytes may be read ahead to a device with `free` bytes."""
    return device.type in AHEAD_ON and free > 1.1 * sizes + RESERVE
