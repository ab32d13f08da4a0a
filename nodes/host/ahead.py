"""Weights that are read in a thread before they are needed.

Only where memory is plentiful: nothing leaves the device for them, and enough stays free for whatever runs meanwhile.
What is needed first is read first: readers share the GIL and the link to the device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from wan_core.checkpoint.opened import CheckpointError
from wan_core.execution.memory.host_weights import tensors_of

log = logging.getLogger("WanCore")
AHEAD_ON = ("cuda",)  # types of device
RESERVE = 32 * 2**30  # bytes that stay free: a text encoder, activations, a VAE at work
POLL = 0.05  # seconds between two looks at whether the user interrupts
TURN = 0.005  # seconds between two looks at whether it is the turn of a module
FAULTS = (CheckpointError, OSError, RuntimeError, ValueError)
"""What reading raises. Whoever needs the weights then reads them again, and raises it where the user sees it."""


class Dropped(Exception):
    """Raised between two tensors where nobody wants the rest."""


class Ahead:
    """A module that is being read. order: it is read when none with a smaller number is being read, and pauses between
    two tensors when one begins. read: does it, and calls what it is given with every number of bytes."""

    unfinished: ClassVar[list[Ahead]] = []

    def __init__(self, name: str, order: int, read_module: Callable[[Callable[[int], None]], nn.Module]) -> None:
        self.name, self.order = name, order
        self.module: nn.Module | None = None
        self.dropped = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(read_module,), name="wancore-ahead", daemon=True)
        self.unfinished.append(self)
        self.thread.start()

    def take(self, poll: Callable[[], None]) -> nn.Module | None:
        """The module when it is read; None if that failed. poll: may raise meanwhile."""
        begin = time.perf_counter()
        while self.thread.is_alive():
            poll()
            self.thread.join(POLL)
        log.info("WanCore waited %.2f s for the %s", time.perf_counter() - begin, self.name)
        return self.module

    def drop(self) -> None:
        """Stop, and free what was read."""
        self.dropped.set()
        if self.thread is not threading.current_thread():  # garbage is collected in any thread, also in this one
            self.thread.join()
        for tensor in tensors_of(self.module).values() if self.module is not None else ():
            tensor.data = tensor.new_empty(0)
        self.module = None

    def _run(self, read_module: Callable[[Callable[[int], None]], nn.Module]) -> None:
        try:
            self._check(0)
            begin = time.perf_counter()
            self.module = read_module(self._check)
            log.info("WanCore read the %s ahead in %.2f s", self.name, time.perf_counter() - begin)
        except Dropped:
            log.info("WanCore stopped reading the %s ahead", self.name)
        except FAULTS as fault:
            log.info("WanCore could not read the %s ahead: %s", self.name, fault)
        finally:
            self.unfinished.remove(self)

    def _check(self, _: int) -> None:
        """Wait until it is its turn. Raises Dropped."""
        while any(one.order < self.order for one in tuple(self.unfinished)) and not self.dropped.wait(TURN):
            pass
        if self.dropped.is_set():
            raise Dropped


def fits(free: int, sizes: int, device: torch.device) -> bool:
    """Whether `sizes` bytes may be read ahead to a device with `free` bytes."""
    return device.type in AHEAD_ON and free > 1.1 * sizes + RESERVE
