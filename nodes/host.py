"""ComfyUI as the nodes see it: devices, model folders, progress and interruption, and its memory manager.

The only file that touches comfy.*, folder_paths and the server.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import folder_paths
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.utils import ProgressBar
from comfy_execution.utils import get_executing_context
from PIL import Image
from server import PromptServer
from torch import Tensor, nn

from wan_core.checkpoint.staged import Reading, reading
from wan_core.config import OptionError
from wan_core.execution.memory.host_weights import Shelf, tensors_of
from wan_core.execution.memory.planning import CONTEXT, unit_bytes
from wan_core.execution.memory.streaming import Stage, stage_bytes
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.loras import AppliedLoras
from wan_core.pipeline.memory_planning import packed_units
from wan_core.pipeline.sources import Part, is_packed

log = logging.getLogger("WanCore")
PREVIEW_SIDE = 512  # pixels of the longer side of a live preview, at most
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")


# ------------------------------------------------------------------------------------------------------------- devices


def device() -> torch.device:
    """Where models run."""
    return model_management.get_torch_device()


def gpu_count() -> int:
    """NVIDIA GPUs that torch sees, whether or not ComfyUI uses one."""
    return torch.cuda.device_count()


def to_intermediate(tensor: Tensor) -> Tensor:
    """Where ComfyUI keeps what travels between nodes: the CPU, unless it was told otherwise."""
    return tensor.to(model_management.intermediate_device())


# ------------------------------------------------------------------------------------------------------- model folders


def model_names(folder: str) -> list[str]:
    """What ComfyUI finds in a kind of model folder; the shards of a model appear as the folder that holds them."""
    names = [*folder_paths.get_filename_list(folder), *_gguf_names(folder)]
    return list(dict.fromkeys(_whole(name) for name in names))


def _gguf_names(folder: str) -> list[str]:
    """GGUF files, which ComfyUI does not list: packs that do so use lists of their own."""
    found: set[str] = set()
    for root in folder_paths.get_folder_paths(folder):
        names, _ = folder_paths.recursive_search(root, excluded_dir_names=[".git"])
        found.update(folder_paths.filter_files_extensions(names, [".gguf"]))
    return sorted(found)


def _whole(name: str) -> str:
    parent = Path(name).parent.as_posix()
    return f"{parent}/" if _SHARD.search(name) and parent != "." else name


def model_path(folder: str, name: str) -> Path:
    """The file or folder behind a name of `model_names`. Raises OptionError."""
    for root in folder_paths.get_folder_paths(folder):
        path = Path(root) / name
        if path.exists():
            return path
    searched = " or ".join(folder_paths.get_folder_paths(folder))
    raise OptionError(f"{name!r} is not in {searched}: put the file there and refresh, or choose another")


def stamps(folder: str, ending: str) -> list[tuple[str, int]]:
    """Files of a kind of model folder whose name ends so, with when they were written: for `fingerprint_inputs`."""
    roots = [Path(root) for root in folder_paths.get_folder_paths(folder)]
    found = sorted({path for root in roots for path in root.rglob(f"*{ending}") if path.is_file()})
    return [(str(path), path.stat().st_mtime_ns) for path in found]


def unfinished_path(seed: int) -> Path:
    """Where latents lie that are finished and have not arrived yet: what a run leaves there was interrupted by force,
    and `python -m wan_core decode` makes a video of it."""
    folder = Path(folder_paths.get_output_directory()) / "WanCore"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"unfinished-{time.strftime('%Y%m%d-%H%M%S')}-{seed}.latents.safetensors"


# ----------------------------------------------------------------------------------------------------------- progress


def check_interruption() -> None:
    """Raises ComfyUI's interruption if the user asked for it."""
    model_management.throw_exception_if_processing_interrupted()


class Progress:
    """The progress bar, live preview and line of text of the node that is running."""

    def __init__(self, total: int) -> None:
        model_management.throw_exception_if_processing_interrupted()
        self.bar = ProgressBar(total)

    def update(self, done: int, total: int, words: str, picture: Image.Image | None = None) -> None:
        """Raises ComfyUI's interruption if the user asked for it."""
        if words:
            show(words)
        self.bar.update_absolute(done, total, None if picture is None else ("JPEG", picture, PREVIEW_SIDE))


def show(words: str) -> None:
    """Text on the node that is running, in every page that is open."""
    context = get_executing_context()
    if context is not None:
        PromptServer.instance.send_progress_text(words, context.node_id)


# -------------------------------------------------------------------------------------------------------------- memory


class Weights(nn.Module):
    """What ComfyUI's memory manager sees of a model: a shell that stays, whose contents come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.content: nn.Module | None = None


class Held(ModelPatcher):
    """A model of the engine that ComfyUI's memory manager may evict; it is read from its file again when used again.

    Nothing is loaded before the first use. What is evicted is gone from host memory too: the file's own pages are the
    copy that a second load reads.
    """

    def __init__(
        self,
        name: str,
        part: Part,
        dtype: torch.dtype,
        finish: Callable[[nn.Module], nn.Module] = lambda module: module,
        quantization: Quantization | None = None,
    ) -> None:
        """finish: applied to the module after every load. quantization: of a transformer's linears, made while they are
        read."""
        size = part.bytes(dtype, quantization)
        super().__init__(Weights(), load_device=device(), offload_device=torch.device("cpu"), size=size)
        self.name, self.part, self.dtype, self.finish = name, part, dtype, finish
        self.quantization = quantization
        self.resident_blocks: int | None = None  # of a transformer whose blocks stream; None: it is loaded as a whole
        self.shelf: Shelf | None = None  # its weights in host memory, kept while this object lives
        self.stage: Stage | None = None

    @property
    def is_loaded(self) -> bool:
        return self.model.content is not None

    def use(self, memory: int) -> nn.Module:
        """The module, on its device, with about `memory` bytes left free beside it."""
        load([self], memory)
        return self.model.content

    @property
    def units(self) -> tuple[int, ...]:
        """Bytes of a transformer's parts that travel as one, the rest first, then every block."""
        assert isinstance(self.part.config, DiTConfig)
        if is_packed(self.quantization):
            return packed_units(self.part, self.dtype, self.quantization)
        kept = 0 if self.quantization is None else self.quantization.keep_blocks
        return unit_bytes(self.part.config, self.dtype.itemsize, self.quantization is not None, kept)

    def stream(self, resident_blocks: int | None) -> None:
        """Have so many blocks stay when it is loaded next, and the others stream. None: it is loaded as a whole again,
        from its file."""
        if resident_blocks == self.resident_blocks:
            return
        if resident_blocks is None:
            self.detach()
            self.shelf = self.resident_blocks = None
            self.size = self.part.bytes(self.dtype, self.quantization)
            return
        if self.is_loaded and self.shelf is None:  # the module stays the same one: a run may be in the middle of it
            module = cast(WanModel, self.model.content)
            AppliedLoras.of(module).clear()  # another branch's: none are put on what streams
            self.shelf = Shelf(module, lock=self.load_device.type == "cuda", device=self.load_device)
        self.detach()
        self.resident_blocks = resident_blocks
        self.size = stage_bytes(list(self.units), resident_blocks)

    def stream_blocks(self, module: WanModel) -> None:
        """Have its blocks run through the stage, if there is one: what a run put around them may have gone with it."""
        if self.stage is not None:
            module.runners.weights = self.stage

    def _load_streaming(self) -> nn.Module:
        """Weights to locked host memory, once; as much as stays to the device."""
        if self.shelf is None:
            with _weights(Reading(on_bytes=_interrupted, mapped=False)):
                module = self.finish(self.part.load(self.offload_device, self.dtype, self.quantization))
            self.shelf = Shelf(module, lock=self.load_device.type == "cuda", device=self.load_device)
        module = cast(WanModel, self.shelf.model)
        self.stage = Stage(self.load_device, self.resident_blocks)
        self.stream_blocks(module)
        self.stage.use(self.shelf)
        log.info("WanCore streams the %s: %s of %d blocks stay", self.name, self.resident_blocks, len(module.blocks))
        return module

    # What the memory manager calls.

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, *_: object, **__: object) -> int:
        """All or nothing: how many bytes were loaded."""
        if self.is_loaded:
            return 0
        begin = time.perf_counter()
        if self.resident_blocks is not None:
            self.model.content = self._load_streaming()
        else:
            with _weights(Reading(on_bytes=_interrupted)):
                self.model.content = self.finish(self.part.load(self.load_device, self.dtype, self.quantization))
        self.model.device = self.load_device
        self.model.model_loaded_weight_memory = self.size
        log.info("WanCore loaded the %s (%s) in %.2f s", self.name, self.part.source, time.perf_counter() - begin)
        return self.size

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, *_: object, **__: object) -> int:
        """Nothing: then the manager evicts the whole."""
        return 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Evict. ComfyUI calls this with False on models that stay, before it uses them again."""
        if unpatch_all and self.is_loaded:
            if self.stage is not None:
                self.stage.leave_device()
                self.stage = None
            elif self.shelf is None:
                for tensor in tensors_of(self.model.content).values():
                    tensor.data = tensor.new_empty(0)  # now, whoever still holds the module: a traceback, a cycle
            self.model.content = None
            self.model.device = self.offload_device
            self.model.model_loaded_weight_memory = 0
            log.info("WanCore evicted the %s", self.name)
        return self.model

    def __del__(self) -> None:
        self.detach()  # a module may be in a reference cycle: its memory must not wait for the collector


@contextmanager
def _weights(how: Reading) -> Iterator[None]:
    """Load inside: weights are plain tensors, not those of the inference mode that nodes run in, whose memory could not
    be exchanged later."""
    with torch.inference_mode(False), torch.no_grad(), reading(how):
        yield


def _interrupted(_: int) -> None:
    """Raises ComfyUI's interruption, between two tensors of a file."""
    model_management.throw_exception_if_processing_interrupted()


def room() -> int:
    """Bytes on the device if everything that can leave did."""
    here = device()
    total = model_management.get_total_memory(here)
    if here.type != "cuda":
        return int(total)
    return int(total) - CONTEXT


class Remote(ModelPatcher):
    """Memory that other processes hold on the device, as one thing that ComfyUI's memory manager may send away: that
    ends them, so that nothing of it is left."""

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__(Weights(), load_device=device(), offload_device=torch.device("cpu"), size=1)
        self.stop = stop

    def use(self, memory: int) -> None:
        """They are about to hold `memory` bytes: others make room, and /free reaches them from now on."""
        self.size = max(self.size, memory)
        model_management.load_models_gpu([self], memory_required=0)

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, *_: object, **__: object) -> int:
        if self.model.device == self.load_device and self.model.model_loaded_weight_memory:
            return 0
        self.model.device = self.load_device
        self.model.model_loaded_weight_memory = self.size
        return self.size

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, *_: object, **__: object) -> int:
        """Nothing: then the manager sends the whole away."""
        return 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """As for `Held`."""
        if unpatch_all and self.model.model_loaded_weight_memory:
            self.stop()
            self.size = 1
            self.model.device = self.offload_device
            self.model.model_loaded_weight_memory = 0
            log.info("WanCore ended the workers")
        return self.model


def load(models: Sequence[Held], memory: int) -> None:
    """Have all `models` on the device at once, with about `memory` bytes left free beside them."""
    model_management.load_models_gpu(list(models), memory_required=memory)


def evict_all() -> None:
    """Send every model off the device, ComfyUI's own too."""
    model_management.free_memory(1e30, device())
