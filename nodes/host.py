"""ComfyUI as the nodes see it: devices, model folders, progress and interruption, and its memory manager.

The only file that touches comfy.*, folder_paths and the server.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

import folder_paths
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.utils import ProgressBar
from comfy_api.latest import InputImpl
from comfy_execution.utils import get_executing_context
from PIL import Image
from server import PromptServer
from torch import Tensor, nn

from wan_core.checkpoint.staged import Reading, reading
from wan_core.config import OptionError
from wan_core.execution.memory.planning import CONTEXT
from wan_core.execution.memory.residency import Residency, tensors_of
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.builder import apply_loras
from wan_core.pipeline.loras import AppliedLoras, Wanted
from wan_core.pipeline.settings import PartToLoad

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


def model_path(folder: str, name: object) -> Path:
    """The file or folder behind a name of `model_names`. Raises OptionError for every other name, before anything is
    opened: a workflow may come from a stranger, and ComfyUI does not check inputs that `validate_inputs` names, nor
    values that come through a link."""
    roots = folder_paths.get_folder_paths(folder)
    if isinstance(name, str) and _is_listed(folder, name):
        for root in roots:
            path = Path(root) / name
            if path.is_dir() if name.endswith("/") else path.is_file():
                return path
    raise OptionError(
        f"{repr(name)[:200]} is not a model in {' or '.join(roots)}: put the file there and refresh, or choose another"
    )


def _is_listed(folder: str, name: str) -> bool:
    """Whether it is one of `model_names`; folders are searched for GGUF files only where that can matter."""
    if name in map(_whole, folder_paths.get_filename_list(folder)):
        return True
    return name.lower().endswith((".gguf", "/")) and name in map(_whole, _gguf_names(folder))


def stamps(folder: str, ending: str) -> list[tuple[str, int]]:
    """Files of a kind of model folder whose name ends so, with when they were written: for `fingerprint_inputs`."""
    roots = [Path(root) for root in folder_paths.get_folder_paths(folder)]
    found = sorted({path for root in roots for path in root.rglob(f"*{ending}") if path.is_file()})
    return [(str(path), path.stat().st_mtime_ns) for path in found]


def unfinished_path(seed: int) -> Path:
    """Where latents lie that are finished and have not arrived yet: what a run leaves there was interrupted by force,
    and `python -m wan_core decode` makes a video of it. In a folder that is read-only nothing is kept, and the run
    says so."""
    folder = Path(folder_paths.get_output_directory()) / "WanCore"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"unfinished-{time.strftime('%Y%m%d-%H%M%S')}-{seed}.latents.safetensors"


def temporary_video() -> Path:
    """The name of a new MP4 in ComfyUI's folder for temporary files, which it empties when it starts and ends."""
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"WanCore-{secrets.token_hex(8)}.mp4"


def video_of(path: Path) -> InputImpl.VideoFromFile:
    """A file on ComfyUI's VIDEO socket."""
    return InputImpl.VideoFromFile(str(path))


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

    Nothing is loaded before the first use. An evicted model is not in host memory either: a second load reads the
    system's file cache. The exception are transformers whose blocks stream: their weights stay in host memory.
    """

    def __init__(
        self,
        name: str,
        part: PartToLoad,
        finish: Callable[[nn.Module], nn.Module] = lambda module: module,
        residency: Residency | None = None,
    ) -> None:
        """finish: applied to the module after every load. residency: of a transformer, holds its weights while its
        blocks stream; both experts share one, so that one hands its device memory over to the other."""
        super().__init__(Weights(), load_device=device(), offload_device=torch.device("cpu"), size=part.bytes)
        self.name, self.part, self.finish, self.residency = name, part, finish, residency
        self.resident_blocks: int | None = None  # of a transformer whose blocks stream; None: it is loaded as a whole

    @property
    def is_loaded(self) -> bool:
        return self.model.content is not None

    def use(self, memory: int) -> nn.Module:
        """The module, on its device, with about `memory` bytes left free beside it."""
        load([self], memory)
        return self.model.content

    @property
    def in_host_memory(self) -> bool:
        """Whether its weights are in host memory, from where they stream."""
        return self.residency is not None and self.name in self.residency.models

    def ready(self, loras: Sequence[Wanted]) -> WanModel:
        """A transformer that is loaded, with just these LoRAs attached. If its blocks stream, they come from now on."""
        model = cast(WanModel, self.model.content)
        streams = self.residency if self.in_host_memory else None
        discard = (lambda: None) if streams is None else partial(streams.forget_copies, self.name)
        apply_loras(model, loras, self.part, self.load_device, discard)
        return model if streams is None else cast(WanModel, streams.use(self.name))

    def has_loras(self, loras: Sequence[Wanted]) -> bool:
        """Whether its weights in host memory are what they are with `loras`."""
        assert self.residency is not None
        model = cast(WanModel, self.residency.models[self.name])
        return not AppliedLoras.of(model, self.load_device).writes_weights(loras)

    def take_over(self, loras: Sequence[Wanted]) -> None:
        """Use the device memory of the other expert, with what `prefetch` has copied there. The other one is still
        loaded as far as ComfyUI knows, and may be evicted then."""
        if self.residency is not None and self.in_host_memory and self.has_loras(loras):
            self.residency.use(self.name)

    def stream(self, resident_blocks: int) -> None:
        """Have so many blocks stay on the device when it is loaded next, and the others stream."""
        if resident_blocks == self.resident_blocks:
            return
        assert self.residency is not None
        if self.is_loaded and not self.in_host_memory:
            # The module stays the same one: a run may be in the middle of it.
            self.residency.add(self.name, self.model.content)
        self.detach()
        self.residency.follow("stream", resident_blocks, None, {})
        self.resident_blocks = resident_blocks
        self.size = stage_bytes(list(self.part.units), resident_blocks)

    def _load(self) -> nn.Module:
        if self.resident_blocks is None:
            with _weights(Reading(on_bytes=_interrupted)):
                return self.finish(self.part.load(self.load_device))
        assert self.residency is not None
        if not self.in_host_memory:
            with _weights(Reading(on_bytes=_interrupted, mapped=False)):
                self.residency.add(self.name, self.finish(self.part.load(self.offload_device)))
        log.info("WanCore streams the %s: %d blocks stay on the device", self.name, self.resident_blocks)
        return self.residency.models[self.name]

    # What the memory manager calls.

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, *_: object, **__: object) -> int:
        """All or nothing: how many bytes were loaded."""
        if self.is_loaded:
            return 0
        begin = time.perf_counter()
        self.model.content = self._load()
        self.model.device = self.load_device
        self.model.model_loaded_weight_memory = self.size
        source = self.part.part.source
        log.info("WanCore loaded the %s (%s) in %.2f s", self.name, source, time.perf_counter() - begin)
        return self.size

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, *_: object, **__: object) -> int:
        """Nothing: then the manager evicts the whole."""
        return 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Evict. ComfyUI calls this with False on models that stay, before it uses them again."""
        if unpatch_all and self.is_loaded:
            if self.residency is not None and self.in_host_memory:
                self.residency.release(self.name)
                AppliedLoras.of(self.model.content, self.load_device).offload()
            else:
                for tensor in tensors_of(self.model.content).values():
                    tensor.data = tensor.new_empty(
                        0
                    )  # now, although a traceback or a reference cycle may still hold the module
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
