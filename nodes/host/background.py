"""Work that is done before someone waits for it: imports and kernels, in a thread of their own.

What fails here is logged and has no other effect: the node that needs the result does the same work, and raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from server import PromptServer

from wan_core.checkpoint.switch_interval import SWITCH_INTERVAL
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.kernels import fused
from wan_core.pipeline.first_use import FAULTS, load_kernels, prepares
from wan_core.pipeline.settings import ModelSettings

from .devices import device

log = logging.getLogger("WanCore")
AFTER_START = 0.1  # seconds after ComfyUI begins to listen: its own start is not slowed
HEAD_DIM = 128  # of every Wan model of full size
IDLE = 0.2  # seconds between two looks at whether a prompt runs


class Background:
    """Named pieces of work, each done once, one after another."""

    def __init__(self) -> None:
        self.threads: dict[Any, threading.Thread] = {}
        self.one_at_a_time = threading.Lock()

    def start(
        self, name: Any, work: Callable[[], object], delay: float = 0.0, busy: Callable[[], bool] = lambda: False
    ) -> None:
        """Begin `work` after `delay` seconds and when nothing is `busy`, unless work of this name was begun before."""
        if name not in self.threads:
            thread = threading.Timer(delay, self._run, (name, work, busy))
            thread.daemon = True
            self.threads[name] = thread
            thread.start()

    def wait(self, name: Any) -> None:
        """Until work of this name has ended, if it was begun."""
        if name in self.threads and self.threads[name].is_alive():
            begin = time.perf_counter()
            self.threads[name].join()
            log.info("WanCore waited %.2f s for %s", time.perf_counter() - begin, name)

    def _run(self, name: Any, work: Callable[[], object], busy: Callable[[], bool]) -> None:
        while not self._done(name, work, busy):
            time.sleep(IDLE)

    def _done(self, name: Any, work: Callable[[], object], busy: Callable[[], bool]) -> bool:
        """Asks `busy` when its turn has come: a prompt may have begun during the work before."""
        with self.one_at_a_time:
            if busy():
                return False
            begin = time.perf_counter()
            try:
                with SWITCH_INTERVAL.short():
                    work()
                log.info("WanCore prepared %s in %.2f s", name, time.perf_counter() - begin)
            except FAULTS as fault:
                log.info("WanCore could not prepare %s before it is needed: %s", name, fault)
            return True


background = Background()


def prepare_when_up() -> None:
    """Import the libraries of attention and kernels when the server is up, where there is a GPU. Without it the first
    loader does so, for seconds."""
    if device().type == "cuda":
        PromptServer.instance.app.on_startup.append(_begin)


async def _begin(_: object) -> None:
    background.start("libraries", lambda: fused.why_not(device()), AFTER_START)
    background.start("attention", _attention, AFTER_START, _prompts_run)


def _prompts_run() -> bool:
    return PromptServer.instance.prompt_queue.get_tasks_remaining() > 0


def _attention() -> None:
    """Import the attention kernel that the model loader takes for `auto`, and call it once. Its import takes longest,
    so it runs only while no prompt runs: a prompt that names another kernel must not wait for it."""
    here = device()
    _, attend = resolve_attention("auto", here, torch.bfloat16, HEAD_DIM)
    tokens = torch.zeros(1, 256, 2, HEAD_DIM, dtype=torch.bfloat16, device=here)
    attend(tokens, tokens, tokens)


def prepare_kernels(settings: ModelSettings) -> str | None:
    """Begin to load the kernels of a transformer that will run as `settings` says. Returns what to `wait` for; None
    where there is nothing to prepare: on a CPU, and where blocks are compiled with their own weights."""
    if not prepares(settings):
        return None
    config = settings.recognised.dit
    name = f"kernels of {config}, {settings.precision}, {settings.attention}"
    background.start(name, lambda: load_kernels(settings, settings.device))
    return name
