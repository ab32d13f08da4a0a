"""Memory that worker processes hold, under ComfyUI's memory manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import torch
from comfy import model_management
from comfy_execution.utils import get_executing_context

from wan_core.execution.memory.planning import CONTEXT

from .devices import device
from .memory import Evictable, log

_remotes: WeakSet[Remote] = WeakSet()


CLUSTER = "cluster"  # the device of workers on other machines: they take no memory here


class Remote(Evictable):
    """What worker processes hold on ComfyUI's device, as one thing that its memory manager may send away: that ends
    them, so that nothing of it is left.

    Before they need more, all models of ComfyUI leave their devices, and what its allocator keeps is given back:
    another process can have neither, and what ranks take while they load is not known exactly. Models that are used
    again come back.
    """

    def __init__(self, stop: Callable[[], None], is_running: Callable[[], bool], devices: Sequence[str]) -> None:
        """devices: of the workers, the first rank's first."""
        super().__init__(size=1)
        self.stop, self.is_running = stop, is_running
        self.devices = frozenset(devices)
        self.here = str(device()) in devices
        self.places = [torch.device(name) for name in self.devices if name not in ("cpu", CLUSTER)]
        self.weights: dict[str, int] = {}  # bytes, by what they are of
        self.working = 0  # bytes beside them, the most so far
        self.prompt: str | None = None  # the last that used them
        _remotes.add(self)

    def begin(self) -> None:
        """The prompt that runs uses these workers. Those of earlier prompts on the same devices end: ComfyUI keeps the
        results of a launcher that was changed as long as host memory is free, and so its workers."""
        context = get_executing_context()
        self.prompt = None if context is None else context.prompt_id
        for other in tuple(_remotes):
            if other.prompt != self.prompt and other.devices & self.devices and other.is_running():
                other._end()

    def use(self, what: str, weights: int, working: int) -> None:
        """The first rank is about to hold the `weights` of `what`, beside those of other things, and needs `working`
        bytes meanwhile; the others hold as much on their devices. Where that is more than before, others leave; and
        /free reaches the workers."""
        self.begin()
        if not self.is_running():
            self._forget()
        self.weights[what] = weights
        self.working = max(self.working, working)
        needed_bytes = CONTEXT + sum(self.weights.values()) + self.working
        lacking = needed_bytes - self.model.model_loaded_weight_memory
        self.size = needed_bytes if self.here else 1
        if lacking > 0:
            workers = [one for one in model_management.current_loaded_models if isinstance(one.model, Remote)]
            for place in {one.device for one in model_management.current_loaded_models}.intersection(self.places):
                model_management.free_memory(1e30, place, keep_loaded=workers)
            model_management.soft_empty_cache()
        model_management.load_models_gpu([self], memory_required=0)

    @property
    def is_loaded(self) -> bool:
        return bool(self.model.model_loaded_weight_memory)

    def bring(self) -> int:
        """The workers load for themselves; the manager counts it."""
        return self.size - self.model.model_loaded_weight_memory

    def leave(self) -> None:
        self._end()
        self.size = 1

    def _end(self) -> None:
        self.stop()
        self._forget()
        log.info("WanCore ended the workers")

    def _forget(self) -> None:
        """They hold nothing."""
        self.weights.clear()
        self.working = self.model.model_loaded_weight_memory = 0
