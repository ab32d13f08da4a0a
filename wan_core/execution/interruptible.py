"""Compiling that a user can interrupt.

torch compiles the parts of a block in their first call, which takes a minute and more on a CPU and cannot be stopped.
It is done in a thread, and the thread that needs the result may leave. What was begun goes on: the next run finds it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

POLL_SECONDS = 0.1


class Interruptible:
    """`part`, a function of a block that torch compiles. poll: called while it does; may raise.

    A call may compile where its block has not seen tensors of this kind. All others are made where they are needed.
    """

    running: ClassVar[threading.Thread | None] = None  # the compiler serves one thread after the other

    def __init__(self, part: Callable[..., Any], poll: Callable[[], None]) -> None:
        self.part, self.poll = part, poll
        self.seen: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()

    def __call__(self, block: nn.Module, *inputs: Any) -> Any:
        kind, seen = kind_of(inputs), self.seen.setdefault(block, set())
        if kind in seen:
            return self.part(block, *inputs)
        made = self._in_thread(block, *inputs)
        seen.add(kind)
        return made

    def _in_thread(self, *inputs: Any) -> Any:
        while (before := Interruptible.running) is not None and before.is_alive():
            self._wait(before)  # for what a run began that was interrupted
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        made: list[Any] = []
        faults: list[BaseException] = []

        def run() -> None:
            try:
                here = nullcontext() if stream is None else torch.cuda.stream(stream)
                with torch.inference_mode(inference), torch.set_grad_enabled(grad), here:
                    made.append(self.part(*inputs))
            except BaseException as fault:  # noqa: BLE001, it is raised again in the other thread
                faults.append(fault)

        thread = Interruptible.running = threading.Thread(target=run, name="wancore-compile", daemon=True)
        thread.start()
        while thread.is_alive():
            self._wait(thread)
        Interruptible.running = None
        if faults:
            raise faults[0]
        return made[0]

    def _wait(self, thread: threading.Thread) -> None:
        self.poll()
        thread.join(POLL_SECONDS)


def kind_of(value: Any) -> Hashable:
    """What of its inputs compiled code depends on, as far as it can be seen: types, and of sizes whether they are 1 and
    whether 16 divide them."""
    if isinstance(value, Tensor):
        sizes = tuple((size == 1, size % 16 == 0) for size in value.shape)
        return value.dtype, value.device, value.is_inference(), sizes
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    return type(value)
