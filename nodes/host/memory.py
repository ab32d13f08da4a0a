"""Models of the engine under ComfyUI's memory manager."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NoReturn, cast
from weakref import WeakSet

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from torch import nn

from wan_core.checkpoint.staged import Reading
from wan_core.config import OptionError
from wan_core.config.host_memory import available_bytes
from wan_core.execution.memory.host_weights import tensors_of
from wan_core.execution.memory.planning import CONTEXT
from wan_core.execution.memory.residency import Residency, Waits
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.models.wan.config import PreparedForm
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.applied_loras import ModelLoras, load_with_loras, merged_of
from wan_core.pipeline.loras import Wanted
from wan_core.pipeline.memory_planning import check_attached, staying_in_file
from wan_core.pipeline.model_parts import is_packed
from wan_core.pipeline.settings import PartToLoad

from .ahead import Ahead, fits
from .devices import device

log = logging.getLogger("WanCore")
ITS_OWN = "WanCore's models stay as they are loaded: leave the node out, or use ComfyUI's loader in place of WanCore's"
# Raises ComfyUI's interruption, between two tensors of a file.
INTERRUPTIBLE = Reading(on_bytes=lambda _: model_management.throw_exception_if_processing_interrupted())
_read_ahead_by_anyone: WeakSet[Held] = WeakSet()


class Weights(nn.Module):
    """What ComfyUI's memory manager sees of a model: a shell that stays, whose contents come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.content: nn.Module | None = None


class Evictable(ModelPatcher):
    """What ComfyUI's memory manager loads, and sends away, as one whole."""

    def __init__(self, size: int, load_device: torch.device | None = None) -> None:
        """load_device: where it runs; None: on ComfyUI's device."""
        here = device() if load_device is None else load_device
        super().__init__(Weights(), load_device=here, offload_device=torch.device("cpu"), size=size)

    @property
    def is_loaded(self) -> bool:
        """Whether something of it is on the device."""
        raise NotImplementedError

    def bring(self) -> int:
        """Load it: how many bytes came."""
        raise NotImplementedError

    def leave(self) -> None:
        """Free what is on the device."""
        raise NotImplementedError

    # What nodes of others call. Without these, patches of weights would be noted and have no effect.

    def clone(self, *_: object, **__: object) -> NoReturn:
        raise OptionError(f"this node changes weights, or where they are. {ITS_OWN}")

    def add_patches(self, *_: object, **__: object) -> NoReturn:
        raise OptionError(f"this node reads or changes weights. {ITS_OWN}")

    add_hook_patches = register_all_hook_patches = get_key_patches = add_patches
    model_state_dict = model_state_dict_for_saving = add_patches

    @property
    def forced_hooks(self) -> None:
        """Return nothing: a model of WanCore has no hooks. Raises OptionError where some are set."""

    @forced_hooks.setter
    def forced_hooks(self, hooks: object) -> None:
        if hooks is not None:
            raise OptionError(f"this node puts hooks on the model. {ITS_OWN}")

    # What the memory manager calls.

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, *_: object, **__: object) -> int:
        """All or nothing: how many bytes were loaded."""
        nbytes = self.bring()
        self.model.device = self.load_device
        self.model.model_loaded_weight_memory = self.size
        return nbytes

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, *_: object, **__: object) -> int:
        """Nothing: then the manager evicts the whole."""
        return 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Evict. ComfyUI calls this with False on models that stay, before it uses them again."""
        if unpatch_all and self.is_loaded:
            self.leave()
            self.model.device = self.offload_device
            self.model.model_loaded_weight_memory = 0
        return self.model


class Held(Evictable):
    """A model of the engine that ComfyUI's memory manager may evict; it is read from its file again when used again.

    Nothing is loaded before the first use. An evicted model is not in host memory either: a second load reads the
    system's file cache. The exception are transformers whose blocks stream: their weights stay in host memory. A text
    encoder's stream from there only while it is used.
    """

    def __init__(
        self,
        name: str,
        part: PartToLoad,
        finish: Callable[[nn.Module], nn.Module] = lambda module: module,
        residency: Residency | None = None,
        order: int = 0,
        load_device: torch.device | None = None,
    ) -> None:
        """finish: applied to the module after every load. residency: of a transformer or a text encoder, holds its
        weights while its blocks stream; both experts share one. order: in which models are read ahead, as of
        `Ahead`."""
        super().__init__(part.bytes, load_device)
        self.name, self.part, self.finish, self.residency, self.order = name, part, finish, residency, order
        self.resident_blocks: int | None = None  # where blocks stream; None: it is loaded as a whole
        self.waits = Waits()  # where blocks stream: how weights wait in host memory
        self.kept_form: PreparedForm | None = None  # how the run before kept what a transformer prepares beside text
        self.loras: tuple[Wanted, ...] = ()  # of a transformer: those to sum in when it is read next
        self.on_model = ModelLoras(self.load_device)  # of a transformer: those on its weights in memory
        self.ahead: Ahead | None = None  # it is being read, and loaded as far as ComfyUI knows
        self.begin_ahead = False  # ComfyUI's next request to load it begins that

    @property
    def is_loaded(self) -> bool:
        return self.model.content is not None or self.ahead is not None

    def settle(self) -> None:
        """Wait until it is read, if that has begun. If that failed, read it now."""
        if self.ahead is None:
            return
        try:
            module = self.ahead.take(model_management.throw_exception_if_processing_interrupted)
        except BaseException:
            self.detach()
            raise
        if module is None:
            self.detach()
            load([self], 0)
            return
        self.model.content, self.ahead = module, None

    def use(self, memory: int) -> nn.Module:
        """The module, on its device, with about `memory` bytes left free beside it."""
        load([self], memory)
        self.settle()
        if self.residency is not None and self.in_host_memory:
            return self.residency.use(self.name)
        return self.model.content

    @property
    def in_host_memory(self) -> bool:
        """Whether its weights are in host memory, from where they stream."""
        return self.residency is not None and self.name in self.residency.models

    def expect(self, loras: Sequence[Wanted]) -> None:
        """The LoRAs that `ready` will ask for: those that are summed in are, while weights are read. Weights that stay
        packed are read again for that. Raises OptionError for one that weights in a mapped file do not take."""
        if self.waits.copy is False:
            check_attached(self.part, loras)
        if self.ahead is not None and tuple(loras) != self.loras:
            self.detach()  # it is being read with others
        self.loras = tuple(loras)
        merged, packed = merged_of(self.part, loras), is_packed(self.part.quantization)
        if packed and self._in_memory() and self.on_model.merged.writes_weights(merged):
            evict_all()
            if self.in_host_memory and self.residency is not None:
                self.residency.remove(self.name)
                self.on_model = ModelLoras(self.load_device)

    def ready(self, loras: Sequence[Wanted]) -> WanModel:
        """A transformer that is loaded, with just these LoRAs on it. If its blocks stream, they come from now on."""
        self.settle()
        model = cast(WanModel, self.model.content)
        streams = self.residency if self.in_host_memory else None
        discard = (lambda: None) if streams is None else partial(streams.forget_copies, self.name)
        with _plain_tensors():
            self.on_model.apply(model, loras, self.part, discard, INTERRUPTIBLE)
        return model if streams is None else cast(WanModel, streams.use(self.name))

    def has_loras(self, loras: Sequence[Wanted]) -> bool:
        """Whether exactly `loras` are on its weights in memory."""
        return self._in_memory() and not self.on_model.changes_weights(loras, self.part)

    def _in_memory(self) -> bool:
        """Whether it is a transformer on the device, or in host memory, from where it streams."""
        return self.in_host_memory or isinstance(self.model.content, WanModel)

    def wait(self, part: PartToLoad, waits: Waits) -> None:
        """Where its weights wait when they are read to stream. part: as it is loaded otherwise."""
        self.part, self.waits = staying_in_file(part) if waits.copy is False else part, waits

    def stream(self, resident_blocks: int) -> None:
        """Have so many blocks stay on the device when it is loaded next, and the others stream."""
        if resident_blocks == self.resident_blocks:
            return
        assert self.residency is not None
        self.settle()
        if self.is_loaded and not self.in_host_memory:
            # The module stays the same one: a run may be in the middle of it.
            self.residency.add(self.name, self.model.content)
        self.detach()
        self.residency.follow("stream", resident_blocks, None, {}, streams_text=True)
        self.resident_blocks = resident_blocks
        self.size = stage_bytes(list(self.part.units), resident_blocks)

    def _load(self) -> nn.Module:
        if self.resident_blocks is None:
            with _plain_tensors():
                return self._read(self.load_device, INTERRUPTIBLE)
        assert self.residency is not None
        if not self.in_host_memory:
            stays = self.waits.copy is False
            how = replace(INTERRUPTIBLE, mapped=stays, stays=stays)
            with _plain_tensors():
                self.residency.add(self.name, self._read(self.offload_device, how), self.waits)
        log.info("WanCore streams the %s: %d blocks stay on the device", self.name, self.resident_blocks)
        return self.residency.models[self.name]

    def _read(self, device: torch.device, how: Reading) -> nn.Module:
        model = self.finish(load_with_loras(self.part, self.loras, device, self.load_device, how))
        self.on_model = ModelLoras(self.load_device, merged_of(self.part, self.loras))
        return model

    def bring(self) -> int:
        if self.is_loaded:
            return 0
        begin, source = time.perf_counter(), self.part.part.source
        if self.begin_ahead:
            read_module = partial(_read_ahead, self.part, self.loras, self.load_device, self.finish)
            self.ahead = Ahead(self.name, self.order, read_module)
            self.on_model = ModelLoras(self.load_device, merged_of(self.part, self.loras))
            log.info("WanCore reads the %s (%s) ahead", self.name, source)
        else:
            self.model.content = self._load()
            log.info("WanCore loaded the %s (%s) in %.2f s", self.name, source, time.perf_counter() - begin)
        return self.size

    def leave(self) -> None:
        if self.ahead is not None:
            self.ahead.drop()
            self.ahead = None
        elif self.residency is not None and self.in_host_memory:
            if isinstance(self.model.content, WanModel):
                self.residency.release(self.name)
                self.on_model.attached.offload()
            else:
                self.residency.remove(self.name)
        else:  # now, although a traceback or a reference cycle may still hold the module
            for tensor in tensors_of(self.model.content).values():
                tensor.data = tensor.new_empty(0)
        if not self.in_host_memory:
            self.on_model = ModelLoras(self.load_device)  # the attached ones would hold its linears
        self.model.content = None
        log.info("WanCore evicted the %s", self.name)

    def __del__(self) -> None:
        self.detach()  # a module may be in a reference cycle: its memory must not wait for the collector


def _read_ahead(
    part: PartToLoad,
    loras: tuple[Wanted, ...],
    device: torch.device,
    finish: Callable[[nn.Module], nn.Module],
    on_bytes: Callable[[int], None],
) -> nn.Module:
    """Load a model like `Held._load`, without a reference to `Held`: the reading thread must not keep it alive."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), _plain_tensors():
        return finish(load_with_loras(part, loras, device, device, Reading(on_bytes=on_bytes)))


def read_ahead(models: Sequence[Held], loras: Sequence[Sequence[Wanted]]) -> None:
    """Begin to read `models`, each with its LoRAs, where they and what others need meanwhile fit on the device. ComfyUI
    may evict them from now on."""
    for patcher, patcher_loras in zip(models, loras, strict=True):
        if patcher.ahead is not None:
            patcher.expect(patcher_loras)
    waiting = [patcher for patcher in models if not patcher.is_loaded and patcher.resident_blocks is None]
    reading = {one for one in _read_ahead_by_anyone if one.ahead is not None and one.ahead.thread.is_alive()}
    here = models[0].load_device
    free = model_management.get_free_memory(here)
    if not waiting or not fits(int(free), sum(one.size for one in {*reading, *waiting}), here):
        return
    for patcher, patcher_loras in zip(models, loras, strict=True):
        if patcher in waiting:
            patcher.expect(patcher_loras)
            patcher.begin_ahead = True
            _read_ahead_by_anyone.add(patcher)
            try:
                load([patcher], 0)
            finally:
                patcher.begin_ahead = False


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Load inside: weights are plain tensors, not those of the inference mode that nodes run in, whose memory could not
    be exchanged later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def room() -> int:
    """Bytes on the device if everything that can leave did, without what is for other programs (--reserve-vram)."""
    here = device()
    total = model_management.get_total_memory(here)
    if here.type != "cuda":
        return int(total)
    from comfy.cli_args import args  # reads the command line when it is imported

    return int(total - (args.reserve_vram or 0) * 2**30) - CONTEXT


def release_pinned(nbytes: int) -> None:
    """Have ComfyUI's models release host memory that they pinned, until `nbytes` are available. Where it streams
    weights (dynamic VRAM), it keeps pinned copies of them in all memory but a few GiB, until someone needs it."""
    release = getattr(model_management, "ensure_pin_budget", None)  # not in ComfyUI 0.8
    if release is not None:
        release(nbytes)


def spare_bytes(needed: int = 0, *, before_run: bool = False) -> int:
    """Host memory that a node may take, after ComfyUI's models released what they pinned of the `needed` bytes.
    before_run: when a graph is queued nothing is released, and what this process holds counts as available too, because
    results of earlier graphs may leave before the node runs."""
    import psutil  # pyright: ignore[reportMissingModuleSource]

    if needed and not before_run:
        release_pinned(needed)
    free = available_bytes(swap=True)
    if free is None:
        free = psutil.virtual_memory().available + psutil.swap_memory().free
    if before_run:
        memory = psutil.Process().memory_info()
        free += memory.rss - getattr(memory, "shared", 0)
    return int(free)


def load(models: Sequence[Held], memory: int) -> None:
    """Have all `models` on the device at once, with about `memory` bytes left free beside them."""
    model_management.load_models_gpu(list(models), memory_required=memory)


def evict_all() -> None:
    """Send every model off the device, ComfyUI's own too."""
    model_management.free_memory(1e30, device())
