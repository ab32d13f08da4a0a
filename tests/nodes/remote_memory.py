"""Run by ComfyUI's Python: workers on a simulated device under its real memory manager. Prints one JSON object.

    python remote_memory.py COMFYUI_PATH

The device has 100 GiB. ComfyUI's process holds models and what its allocator keeps; the workers, processes of their
own, can have only what neither of them does.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import native_models as world

GIB = 2**30
TOTAL = 100 * GIB


class Device:
    """cuda:0 and cuda:1 as ComfyUI's memory manager sees them, each with a model of ComfyUI's own."""

    def __init__(self, model: int, kept_bytes: int) -> None:
        """model: bytes of ComfyUI's own model on each. kept: bytes that its allocator keeps on each."""
        import comfy.model_management as manager
        import torch

        self.manager, self.kept, self.workers, self.ended = manager, kept_bytes, 0, 0
        self.names = [torch.device("cuda", index) for index in range(2)]
        manager.current_loaded_models.clear()
        manager.get_free_memory = self.free
        manager.soft_empty_cache = self.give_back
        manager.minimum_inference_memory = lambda: GIB
        manager.extra_reserved_memory = lambda: 0
        self.own: list[Any] = []
        self.load(model)

    def load(self, model: int) -> None:
        """ComfyUI loads a model of so many bytes on each device."""
        import comfy.model_patcher
        import torch

        manager, cpu = self.manager, torch.device("cpu")
        new = [comfy.model_patcher.ModelPatcher(torch.nn.Linear(1, 1), name, cpu, model) for name in self.names]
        self.own += new
        for one in new:
            one.model.model_loaded_weight_memory, one.model.device = model, one.load_device
            one.partially_unload = lambda *_, **__: 0
            loaded = manager.LoadedModel(one)
            loaded.real_model, loaded.model_finalizer = (lambda: None), FINALIZER
            manager.current_loaded_models.append(loaded)

    def held(self, name: Any) -> int:
        return sum(one.model.model_loaded_weight_memory for one in self.own if one.load_device == name)

    def free(self, name: Any = None, torch_free_too: bool = False) -> Any:
        free = TOTAL - self.held(name) - self.workers
        return (free, self.kept) if torch_free_too else free

    def left(self, name: Any) -> int:
        """What another process can have there."""
        return TOTAL - self.held(name) - self.kept - self.workers

    def give_back(self, force: bool = False) -> None:
        self.kept = 0

    def remote(self, pack: Any, running: list[bool], devices: tuple[str, ...] = ("cuda:0", "cuda:1")) -> Any:
        module = importlib.import_module("pack.nodes.host.remote")
        for user in (module, importlib.import_module("pack.nodes.host.memory")):
            user.device = lambda: self.names[0]

        def stop() -> None:
            self.workers, self.ended, running[0] = 0, self.ended + 1, False

        return module.Remote(stop, lambda: running[0], devices)


class Finalizer:
    def detach(self) -> None:
        pass


FINALIZER = Finalizer()


def kept_is_given_back(pack: Any) -> str:
    """Enough is free in the manager's count, and not for another process."""
    device = Device(model=0, kept_bytes=24 * GIB)
    device.remote(pack, [True]).use("experts", 75 * GIB, 5 * GIB)
    return "" if device.left(device.names[0]) >= 81 * GIB else f"{device.left(device.names[0]) / GIB:.0f} GiB left"


def others_make_room(pack: Any) -> str:
    device = Device(model=70 * GIB, kept_bytes=10 * GIB)
    device.remote(pack, [True]).use("experts", 40 * GIB, 5 * GIB)
    free = [device.left(name) / GIB for name in device.names]
    return "" if min(free) >= 46 else f"{free} GiB left"


def models_leave_although_there_is_room(pack: Any) -> str:
    """How much ranks take while they load is not known well enough to leave others there."""
    device = Device(model=20 * GIB, kept_bytes=4 * GIB)
    device.remote(pack, [True]).use("experts", 30 * GIB, 5 * GIB)
    left = [device.left(name) for name in device.names]
    return "" if left == [TOTAL, TOTAL] else f"{[one / GIB for one in left]} GiB left"


def held_is_not_asked_for_again(pack: Any) -> str:
    """What the workers hold is theirs: the same again sends nothing away, more does."""
    device, running = Device(model=0, kept_bytes=0), [True]
    remote = device.remote(pack, running)
    remote.use("experts", 40 * GIB, 5 * GIB)
    device.workers = 46 * GIB
    device.load(30 * GIB)
    remote.use("experts", 40 * GIB, 4 * GIB)
    if device.held(device.names[0]) != 30 * GIB:
        return "a model left although nothing was lacking"
    remote.use("vae", 10 * GIB, 18 * GIB)
    if device.held(device.names[0]):
        return "a model stayed where workers need more"
    return "the workers were ended" if device.ended else ""


def workers_that_ended_hold_nothing(pack: Any) -> str:
    device, running = Device(model=30 * GIB, kept_bytes=0), [True]
    remote = device.remote(pack, running)
    remote.use("experts", 60 * GIB, 5 * GIB)
    running[0], device.workers, device.kept = False, 0, 65 * GIB
    remote.use("vae", 1 * GIB, 5 * GIB)
    if device.left(device.names[0]) < 6 * GIB:
        return f"{device.left(device.names[0]) / GIB:.0f} GiB left for workers that start again"
    return "" if remote.size < 10 * GIB else f"counted with {remote.size / GIB:.0f} GiB"


def others_may_end_them(pack: Any) -> str:
    device = Device(model=0, kept_bytes=0)
    remote = device.remote(pack, [True])
    remote.use("experts", 60 * GIB, 5 * GIB)
    device.workers = 66 * GIB
    device.manager.free_memory(60 * GIB, device.names[0])
    return "" if device.ended == 1 and remote.size == 1 else "they hold their memory still"


def a_later_prompt_ends_others_on_its_devices(pack: Any) -> str:
    """A graph may have several launchers, and ComfyUI keeps those of earlier graphs."""
    device, module = Device(model=0, kept_bytes=0), importlib.import_module("pack.nodes.host.remote")
    running = {name: [False] for name in ("first", "beside", "elsewhere", "changed")}
    remotes = {
        name: device.remote(pack, running[name], ("cuda:2",) if name == "elsewhere" else ("cuda:1",))
        for name in running
    }
    used = {"one": ("first", "beside", "elsewhere"), "two": ("changed",)}
    module.get_executing_context = lambda: SimpleNamespace(prompt_id=prompt)
    for prompt, names in used.items():
        for name in names:
            remotes[name].begin()
            running[name][0] = True
            remotes[name].use("experts", 10 * GIB, 1 * GIB)
        run = [name for name, runs in running.items() if runs[0]]
        if run != (list(names) if prompt == "one" else ["elsewhere", "changed"]):
            return f"after prompt {prompt} these run: {run}"
    return ""


CHECKS = {
    check.__name__: check
    for check in (
        kept_is_given_back,
        others_make_room,
        models_leave_although_there_is_room,
        held_is_not_asked_for_again,
        workers_that_ended_hold_nothing,
        others_may_end_them,
        a_later_prompt_ends_others_on_its_devices,
    )
}

if __name__ == "__main__":
    pack = world.set_up(sys.argv[1])
    print(json.dumps({name: check(pack) for name, check in CHECKS.items()}))
