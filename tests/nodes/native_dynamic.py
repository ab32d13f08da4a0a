"""Run by ComfyUI's Python: WanCore beside ComfyUI's dynamic VRAM, which is on by default on NVIDIA cards: weights stay
in host memory, and a layer's come to the device when it runs. `native_checks` runs its checks.

ComfyUI's code runs as on a GPU. The driver's part is simulated: memory that holds weights on the device as long as
nobody needs it (`DeviceMemory`), or, where `room` is none, a buffer that each layer's weights overwrite.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import native_models
import torch
from native_blocks import SIGMAS
from native_blocks import World as Blocks
from native_models import LAYERS, refusal, rows, variants
from native_vae import LATENTS, random_vae

native_models.SMALL |= {"dim": 96, "ffn_dim": 192}  # ComfyUI loads layers up to 16 KiB with the model
DEVICE = torch.device("cpu", 0)  # differs from the host's, "cpu"
GIB = 2**30


class DeviceMemory:
    """The weights of one model on the device, in the place of comfy_aimdo.model_vbar.ModelVBAR."""

    room, faults, pinned = True, 0, 0

    def __init__(self, *_: Any) -> None:
        self.size, self.held = 0, dict[int, torch.Tensor]()

    def prioritize(self) -> None:
        pass

    def alloc(self, nbytes: int) -> tuple[DeviceMemory, int, int]:
        self.size += nbytes
        return self, self.size - nbytes, nbytes

    def fault(self, at: int, _: int) -> Any:
        DeviceMemory.faults += 1
        DeviceMemory.pinned += self.room
        return bytes(f"{id(self)} {at}", "ascii") if self.room else None

    def unpin(self, *_: int) -> None:
        DeviceMemory.pinned -= 1

    def loaded_size(self) -> int:
        return sum(memory.numel() for memory in self.held.values())

    def free_memory(self, _: int) -> int:
        freed = self.loaded_size()
        self.held.clear()
        return freed

    def bytes_at(self, at: int, nbytes: int) -> torch.Tensor:
        if at not in self.held:
            self.held[at] = torch.empty(nbytes, dtype=torch.uint8)
        return self.held[at]


class Buffer:
    """The one through which weights come that have no room on the device. It is its own stream, and never late."""

    def __init__(self) -> None:
        self.memory = torch.empty(1 << 28, dtype=torch.uint8)

    def __enter__(self, *_: Any) -> None:
        pass

    __exit__ = wait_stream = synchronize = __enter__

    def size(self) -> int:
        return self.memory.numel()

    def get(self, nbytes: int, at: int) -> tuple[Buffer, int, int]:
        return self, at, nbytes

    def bytes_at(self, at: int, nbytes: int) -> torch.Tensor:
        return self.memory[at : at + nbytes]


class OnHost(torch.Tensor):
    """A weight that is not on the device, although both are the CPU."""

    device = property(lambda _: torch.device("cpu", 1))  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func.__name__ in ("detach", "requires_grad_") else result


@cache
def simulate() -> None:
    import comfy_aimdo.host_buffer
    import comfy_aimdo.model_vbar
    import comfy_aimdo.torch
    from comfy import memory_management, model_management, model_patcher
    from comfy.cli_args import args

    comfy_aimdo.model_vbar.ModelVBAR = DeviceMemory
    comfy_aimdo.model_vbar.vbars_analyze = lambda *_: 0
    comfy_aimdo.host_buffer.HostBuffer = lambda *_: types.SimpleNamespace(size=0)
    comfy_aimdo.torch.aimdo_to_tensor = lambda memory, _: memory[0].bytes_at(*memory[1:])
    args.disable_pinned_memory = memory_management.aimdo_enabled = True
    buffer = Buffer()
    model_management.get_offload_stream = lambda _: None if DeviceMemory.room else buffer
    model_management.get_aimdo_cast_buffer = lambda *_: buffer
    model_management.is_device_cpu = lambda _: False
    model_patcher.ModelPatcherDynamic.__new__ = lambda kind, *_, **__: object.__new__(kind)
    model_patcher.CoreModelPatcher = model_patcher.ModelPatcherDynamic


class World:
    def __init__(self, pack: types.ModuleType) -> None:
        self.pack, self.host = pack, pack.host  # type: ignore[attr-defined]
        simulate()
        DeviceMemory.room, DeviceMemory.faults = True, 0


def streamed(make: Callable[[], Any]) -> Any:
    """A ModelPatcher of ComfyUI's around the same model, whose weights stream."""
    from comfy import memory_management, model_patcher

    memory_management.aimdo_enabled = False  # or layers have no weights, before a file is loaded
    model = make()
    memory_management.aimdo_enabled = True
    for module in model.model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(weight.detach().as_subclass(OnHost), requires_grad=False))
    return model_patcher.CoreModelPatcher(model.model, load_device=DEVICE, offload_device=torch.device("cpu"))


def check_blocks(it: World) -> None:
    """A run with the node gives what it gives without, with fused blocks and with LoRAs; no weight stays pinned."""
    import comfy.sd

    blocks, name = Blocks(it.pack), "diffusion_model.blocks.1.self_attn.q"
    for kind in ("t2v", "i2v", "5B"):
        make, extra, size = variants()[kind]
        model = streamed(make)
        lora = {f"{name}.lora_A.weight": rows(4, 96), f"{name}.lora_B.weight": rows(96, 4)}
        for one in (model, comfy.sd.load_lora_for_models(model, None, lora, 0.5, 0)[0]):
            for DeviceMemory.room in (True, False):
                before = DeviceMemory.faults
                blocks.same(one, 3 * LAYERS, SIGMAS, extra, what=(kind, DeviceMemory.room), size=size)
                assert DeviceMemory.faults > before and not DeviceMemory.pinned


def check_vae(it: World) -> None:
    """A VAE whose weights stream gives the pictures and latents that it gives by itself."""
    from comfy import sd

    from wan_core.execution.report import Report

    with torch.inference_mode():
        plain = random_vae("2.1", torch.float32, torch.float32)
        state = {name: weight.as_subclass(OnHost) for name, weight in plain.get_sd().items()}
        latents = torch.randn(LATENTS["2.1"], generator=torch.Generator().manual_seed(5))
        pixels = torch.cat([torch.rand(1, 16, 16, 3), torch.full((8, 16, 16, 3), 0.5)])
        vae = sd.VAE(sd=state, dtype=torch.float32, device=DEVICE)
        config = it.host.native_vae_config(vae)
        for DeviceMemory.room in (True, False):
            report, how = Report(torch.device("cpu")), {"dtype": torch.float32}
            consume = lambda pieces: torch.cat([piece for _, piece in pieces])  # noqa: E731
            pictures = it.host.decode_native_to(vae, config, latents, report, consume, **how)
            assert (pictures - vae.decode(latents).flatten(0, -4)).abs().max() <= 1e-5, DeviceMemory.room
            before = DeviceMemory.faults
            found, native = it.host.with_still_frames(vae).encode(pixels), vae.encode(pixels)
            assert (found - native).abs().max() <= 1e-5 * native.abs().max(), DeviceMemory.room
            assert DeviceMemory.faults > before and not DeviceMemory.pinned


class Pinned:
    """Host memory of 16 GiB, of which a model of ComfyUI's has pinned all but 2."""

    def __init__(self, it: World) -> None:
        import psutil
        from comfy import model_management, model_patcher

        module = torch.nn.Module()
        module.dynamic_pins = {DEVICE: {"active": False, "current_prompt": True}}
        self.model = model_patcher.ModelPatcher(module, load_device=DEVICE, offload_device=torch.device("cpu"))
        self.model.is_dynamic = lambda: True
        self.model.partially_unload_ram = self.release
        self.bytes = 14 * GIB
        model_management.current_loaded_models[:] = [model_management.LoadedModel(self.model)]
        model_management.current_loaded_models[0].real_model = lambda: module
        process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=self.bytes))
        psutil.Process = lambda: process
        psutil.virtual_memory = lambda: types.SimpleNamespace(available=16 * GIB - self.bytes)
        memory = importlib.import_module("pack.nodes.host.memory")
        memory.available_bytes = lambda **_: 16 * GIB - self.bytes

    def release(self, nbytes: int, subsets: Any) -> int:
        released = min(nbytes, self.bytes) if "weights" in subsets else 0
        self.bytes -= released
        return released


def check_pinned_memory_is_released(it: World) -> None:
    """ComfyUI's models release what they pinned for the pictures of a node that would otherwise be refused, no more,
    and nothing before a prompt runs."""
    inputs, sockets = map(importlib.import_module, ("pack.nodes.video_inputs", "pack.nodes.sockets"))
    from wan_core.models.vae.config import VAE_21
    from wan_core.models.wan.families import FAMILIES

    def check(frames: int, **how: Any) -> Any:
        return inputs.check_room(FAMILIES["vace"], VAE_21, (1280, 720, frames), **how)

    pinned = Pinned(it)
    check(81, before_run=True)
    check(9)
    assert pinned.bytes > 12 * GIB
    check(81)
    assert 5 * GIB < pinned.bytes < 9 * GIB
    assert "at this size at most" in refusal(lambda: check(401))

    pinned = Pinned(it)
    part = types.SimpleNamespace(part=types.SimpleNamespace(config=VAE_21))
    vae = sockets.VAESocket(types.SimpleNamespace(part=part))
    vae.decode_to = lambda *_, **how: pinned.bytes
    assert vae.decode_images(torch.empty(1, 16, 61, 90, 160, device="meta"), None, None, None) < 13 * GIB
