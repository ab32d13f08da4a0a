"""Run by ComfyUI's Python: workers on a simulated device under its real memory manager (`native_checks`).

The device has 100 GiB. ComfyUI's process holds models and what its allocator keeps; the workers, processes of their
own, can have only what neither of them does.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

GIB = 2**30
TOTAL = 100 * GIB


class World:
    def __init__(self, _: Any) -> None:
        pass


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

    def remote(self, running: list[bool], devices: tuple[str, ...] = ("cuda:0", "cuda:1")) -> Any:
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


def check_kept_is_given_back(_: World) -> None:
    """Enough is free in the manager's count, and not for another process."""
    device = Device(model=0, kept_bytes=24 * GIB)
    device.remote([True]).use("experts", 75 * GIB, 5 * GIB)
    assert device.left(device.names[0]) >= 81 * GIB


def check_room_for_other_programs(_: World) -> None:
    """What --reserve-vram is for is not planned with."""
    import comfy.model_management as manager
    from comfy.cli_args import args

    memory = importlib.import_module("pack.nodes.host.memory")
    real = memory.device, manager.get_total_memory
    memory.device, manager.get_total_memory = lambda: Device(model=0, kept_bytes=0).names[0], lambda _: TOTAL
    try:
        rooms = []
        for args.reserve_vram in (None, 8.0):
            rooms.append(memory.room())
    finally:
        args.reserve_vram = None
        memory.device, manager.get_total_memory = real
    assert rooms[0] < TOTAL and rooms[0] - rooms[1] == 8 * GIB, rooms


def check_others_make_room(_: World) -> None:
    device = Device(model=70 * GIB, kept_bytes=10 * GIB)
    device.remote([True]).use("experts", 40 * GIB, 5 * GIB)
    assert min(device.left(name) for name in device.names) >= 46 * GIB


def check_models_leave_although_there_is_room(_: World) -> None:
    """How much ranks take while they load is not known well enough to leave others there."""
    device = Device(model=20 * GIB, kept_bytes=4 * GIB)
    device.remote([True]).use("experts", 30 * GIB, 5 * GIB)
    assert [device.left(name) for name in device.names] == [TOTAL, TOTAL]


def check_held_is_not_asked_for_again(_: World) -> None:
    """What the workers hold is theirs: the same again sends nothing away, more does."""
    device, running = Device(model=0, kept_bytes=0), [True]
    remote = device.remote(running)
    remote.use("experts", 40 * GIB, 5 * GIB)
    device.workers = 46 * GIB
    device.load(30 * GIB)
    remote.use("experts", 40 * GIB, 4 * GIB)
    assert device.held(device.names[0]) == 30 * GIB, "a model left although nothing was lacking"
    remote.use("vae", 10 * GIB, 18 * GIB)
    assert not device.held(device.names[0]), "a model stayed where workers need more"
    assert not device.ended


def check_workers_that_ended_hold_nothing(_: World) -> None:
    device, running = Device(model=30 * GIB, kept_bytes=0), [True]
    remote = device.remote(running)
    remote.use("experts", 60 * GIB, 5 * GIB)
    running[0], device.workers, device.kept = False, 0, 65 * GIB
    remote.use("vae", 1 * GIB, 5 * GIB)
    assert device.left(device.names[0]) >= 6 * GIB, "for workers that start again"
    assert remote.size < 10 * GIB


def check_others_may_end_them(_: World) -> None:
    device = Device(model=0, kept_bytes=0)
    remote = device.remote([True])
    remote.use("experts", 60 * GIB, 5 * GIB)
    device.workers = 66 * GIB
    device.manager.free_memory(60 * GIB, device.names[0])
    assert device.ended == 1 and remote.size == 1


def check_a_later_prompt_ends_others_on_its_devices(_: World) -> None:
    """A graph may have several launchers, and ComfyUI keeps those of earlier graphs."""
    device, module = Device(model=0, kept_bytes=0), importlib.import_module("pack.nodes.host.remote")
    running = {name: [False] for name in ("first", "beside", "elsewhere", "changed")}
    remotes = {
        name: device.remote(running[name], ("cuda:2",) if name == "elsewhere" else ("cuda:1",)) for name in running
    }
    used = {"one": ("first", "beside", "elsewhere"), "two": ("changed",)}
    module.get_executing_context = lambda: SimpleNamespace(prompt_id=prompt)
    for prompt, names in used.items():
        for name in names:
            remotes[name].begin()
            running[name][0] = True
            remotes[name].use("experts", 10 * GIB, 1 * GIB)
        run = [name for name, runs in running.items() if runs[0]]
        assert run == (list(names) if prompt == "one" else ["elsewhere", "changed"]), (prompt, run)
