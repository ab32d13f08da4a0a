"""What travels between nodes. Models and reports have sockets of their own; text encoders and VAEs travel on ComfyUI's
CLIP and VAE sockets, with the methods that its own nodes call, so that either side can be replaced.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from comfy_api.latest import io
from torch import Tensor

from wan_core.config import LoadOptions, OptionError, WindowOptions
from wan_core.execution.memory.owner import RunOwner
from wan_core.execution.memory.planning import (
    TEXT,
    Beside,
    MemoryPlan,
    Placed,
    Sizes,
    plan_again,
    plan_memory,
    vae_bytes,
)
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.execution.report import Report
from wan_core.media.preview import RGBMap
from wan_core.models.text.umt5 import PromptCache, TextEncoder
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.vision.clip import VisionEncoder
from wan_core.models.wan.config import PreparedForm
from wan_core.models.wan.families import TASKS
from wan_core.models.wan.families.media import pixels_to_video, video_to_pixels
from wan_core.models.wan.families.wan.inputs import known_frames
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.decode import Made, Pieces, collect_images, decode_to, images_shape
from wan_core.pipeline.host_planning import check_prepared, host_room, plan_host
from wan_core.pipeline.loras import Wanted, lora_bytes
from wan_core.pipeline.media import encode_images, encode_video
from wan_core.pipeline.memory_planning import Workload, beside_workload
from wan_core.pipeline.model_parts import Experts
from wan_core.pipeline.settings import ModelSettings
from wan_core.sampling.build import ModelFacts
from wan_core.sampling.plan import Expert

from . import host

MODEL = io.Custom("WANCORE_MODEL")  # ModelSocket
REPORT = io.Custom("WANCORE_REPORT")  # wan_core.execution.report.Report
SKIPPING = io.Custom("WANCORE_SKIPPING")  # wan_core.config.SkipOptions
CONDITIONING = list[list[Any]]  # [[rows [1, L, 4096], {...}]]
DEFAULT_NEGATIVES = {task.negative_prompt for task in TASKS.values()} - {""}


@dataclass(frozen=True, eq=False)
class ModelSocket:
    """One or two experts, not loaded before they are used. `options`: what the user chose; workers load by them.
    `settings`: what that means on the device. `pace`: seconds per forward of the last run."""

    options: LoadOptions
    settings: ModelSettings
    held: Mapping[Expert, host.Held]  # both are one where a single transformer runs every step
    rgb: RGBMap | None
    pace: dict[Expert, float] = field(default_factory=dict)
    loras: Mapping[str, tuple[Wanted, ...]] = field(default_factory=dict)  # by expert
    workers: Any = None  # WorkersSocket: they load and run it
    shift: float | None = None  # that came with the model; None: the task's own
    range_shift: float | None = None  # of a MODEL, with which ranges of texts are sigmas; None: that of the run
    windows: WindowOptions | None = None  # context windows of a longer video
    kernels: str | None = None  # those that are being prepared, see `host.prepare_kernels`

    @property
    def experts(self) -> Experts:
        return cast(Experts, self.settings.found)

    @property
    def facts(self) -> ModelFacts:
        """What a plan depends on."""
        experts = self.experts
        return ModelFacts(
            task=experts.task,
            dit=experts.dit,
            vae=experts.vae,
            high=experts.high.path,
            low=None if experts.low is None else experts.low.path,
            loras=tuple(self.lora_files),
            alone=experts.low is None,
        )

    @property
    def patcher(self) -> host.Held:
        """By this ComfyUI's cache of results sees that an output holds a model (--cache-ram lets old ones go first)."""
        return self.held["high"]

    @property
    def lora_files(self) -> list[Path]:
        """Those that count for something."""
        return [Path(one.key[0]) for wanted in self.loras.values() for one in wanted if one.strength]

    def loras_of(self, expert: Expert) -> tuple[Wanted, ...]:
        return self.loras.get(expert if self.experts.low else "high", ())

    def acquire(self, expert: Expert, workload: Workload, report: Report) -> WanModel:
        """The expert, on the device; a load is timed as a phase of `report`."""
        if self.workers is not None:
            raise OptionError("workers hold this model, and this node needs it here: use a loader without workers")
        held, plan = self.held[expert], self.plan(workload)
        memory, residency = plan.beside[expert], self.options.residency
        together = list(dict.fromkeys(self.held.values())) if residency == "resident" else [held]
        blocks = plan.staying_blocks
        if blocks is not None:
            report.notes += self._plan_host(plan.form)
        else:
            check_prepared(plan.form, held.kept_form, self._waiting())
        if plan.form is not None and plan.form.host:
            report.notes.append(f"memory: {plan.form.words}")
        for name, one in self.held.items():
            one.expect(self.loras_of(name))
            if blocks is not None:
                one.stream(blocks)
        if (residency == "swap" or blocks is not None) and not held.is_loaded:
            if any(one.is_loaded for one in self.held.values()):
                held.take_over(self.loras_of(expert))
            host.evict_all()
        loras, loaded = self.loras_of(expert), all(one.is_loaded for one in together)
        if loaded and held.has_loras(loras):
            host.load(together, memory)
            return self._ready(expert, plan.form)
        host.show(f"{'LoRAs of' if loaded else 'loading'} the {held.name} ...")
        with report.phase(f"load {expert}"):
            host.load(together, memory)
            host.background.wait(self.kernels)
            return self._ready(expert, plan.form)

    def _ready(self, expert: Expert, form: PreparedForm | None) -> WanModel:
        """One that is loaded, which keeps what it prepares as `form` says."""
        held = self.held[expert]
        model = held.ready(self.loras_of(expert))
        held.kept_form = model.prepared_form = form
        return model

    def _plan_host(self, prepared: PreparedForm | None) -> list[str]:
        """Decide where weights wait that are about to be read and streamed, beside what a run prepares; says which are
        not pinned. Raises OptionError where they do not fit into host memory."""
        parts = {name: part for name, part in self.settings.parts.items() if not self.held[name].in_host_memory}
        kept = None if prepared is None or prepared.uses_again(self.held["high"].kept_form) else prepared
        plan = plan_host(parts, host_room(), kept)
        for name, part in parts.items():
            self.held[name].wait(part, plan.copies(name))
        return [f"{name}: weights stay in the mapped file, pinned memory is short" for name in sorted(plan.mapped)]

    def read_ahead(self) -> None:
        """Begin to read the experts, where everything fits beside them."""
        if self.workers is None and self.options.residency in ("auto", "resident"):
            held = {name: one for name, one in self.held.items() if name == "high" or one is not self.held["high"]}
            host.read_ahead(list(held.values()), [self.loras_of(name) for name in held])

    def prefetch(self, expert: Expert, other: Expert, runs: int) -> None:
        """The next `runs` runs of the blocks of `expert` are the last before `other` is acquired: if both stream, copy
        its weights behind them."""
        now, then = self.held[expert], self.held[other]
        if now.residency is None or not (now.in_host_memory and then.in_host_memory):
            return
        if then.has_loras(self.loras_of(other)):
            now.residency.prefetch(now.name, then.name, runs)

    def _waiting(self) -> int:
        """Bytes of weights that wait in host memory, or in their files."""
        waits = {id(one): one.part.bytes for one in self.held.values() if one.in_host_memory}
        return sum(waits.values())

    def plan(self, workload: Workload) -> MemoryPlan:
        """The memory plan of the experts alone, made as on the command line. Blocks that stream now stay so where that
        fits."""
        held, room, units = self.held["high"], host.room(), self.held["high"].part.units
        attached = [n for n in self.settings.parts if self.held[n].part.lora_mode == "attach"]
        loras = lora_bytes(one for name in attached for one in self.loras.get(name, ()))
        settings = self.settings
        beside = beside_workload(settings.found, workload, settings.per_token(), settings.dtype.itemsize)
        beside = replace(beside, denoise=beside.denoise + loras)
        sizes = Sizes(units=units, experts=1, text_encoder=0, vae=0)
        free = host_room()
        host_memory = None if free is None else free + self._waiting()
        asked = self.options.residency  # where no blocks stream, weights are on the device alone
        mode = asked if asked in ("auto", "stream") else "resident"
        blocks = None if mode == "resident" else held.resident_blocks
        placed = None if blocks is None else Placed(policy="stream", resident_blocks=blocks)
        return plan_again(sizes, beside, room, placed, mode, None, host_memory, held.kept_form)

    def relieve(self, expert: Expert, workload: Workload) -> str | None:
        """After out of memory: everyone else leaves, and half of the blocks that stayed stream. In words; None where no
        more can stream."""
        held = self.held[expert]
        blocks = len(held.part.units) - 1
        stay = blocks if held.resident_blocks is None else held.resident_blocks
        if not stay:
            return None
        for one in self.held.values():
            one.stream(stay // 2)
        host.evict_all()
        plan = self.plan(workload)
        host.load([held], plan.beside[expert])
        self._ready(expert, plan.form)
        return f"other models left the device, {stay // 2} of {blocks} blocks stay, the others stream"


class ComfyMemory(RunOwner):
    """The experts of one run under ComfyUI's memory manager."""

    def __init__(self, model: ModelSocket, workload: Workload, report: Report) -> None:
        super().__init__(report)
        self.model, self.workload = model, workload

    def acquire(self, expert: Expert) -> WanModel:
        return self.model.acquire(expert, self.workload, self.report)

    def prefetch(self, expert: Expert, following: Expert, runs: int) -> None:
        self.model.prefetch(expert, following, runs)

    def make_room(self, name: str) -> str | None:
        return self.model.relieve(cast(Expert, name), self.workload)


class TextSocket:
    """A UMT5 encoder on a CLIP socket; encoded prompts are kept with it."""

    def __init__(self, held: host.Held) -> None:
        self.patcher = self.held = held  # patcher: as of `ModelSocket`
        self.cache = PromptCache()

    def encode(self, prompts: Sequence[str], names: Sequence[str] = ()) -> list[CONDITIONING]:
        """Each prompt as CONDITIONING. names: what notes call each. `wancore_seconds` in it is what encoding took, 0 if
        it was known, `wancore_notes` is what the user should know of how the prompt was read, and `wancore_prompt` is
        the prompt."""
        ran: list[float] = []

        def encoder() -> TextEncoder:
            ran.append(time.perf_counter())
            return self.encoder()

        rows = self.cache.encode(prompts, encoder)
        seconds = time.perf_counter() - ran[0] if ran else 0.0
        host.log.info("WanCore encoded the text in %.2f s" if ran else "WanCore knew the text (%.0f s)", seconds)
        made: list[CONDITIONING] = []
        for prompt, name, row in zip(prompts, names or ["prompt"] * len(prompts), rows, strict=True):
            # a long default is meant for other encoders, and nobody wrote it
            notes = self.cache.notes(prompt, name) if prompt not in DEFAULT_NEGATIVES else []
            for note in notes:
                host.log.warning("WanCore: %s", note)
            extras = {"wancore_seconds": seconds, "wancore_notes": notes, "wancore_prompt": prompt}
            made.append([[row, {"pooled_output": None, **extras}]])
        return made

    def encoder(self) -> TextEncoder:
        """On its device. Its blocks stream if it does not fit there as a whole."""
        part = self.held.part
        sizes = Sizes(units=(0,), experts=1, text_encoder=part.bytes, text_stage=stage_bytes(part.units, 0), vae=0)
        if plan_memory(sizes, Beside(text=TEXT, denoise=0, decode=0), host.room(), "swap").streams_text:
            if not self.held.in_host_memory:
                self.held.wait(part, plan_host({"text_encoder": part}, host_room()).copies("text_encoder"))
            self.held.stream(0)
        return cast(TextEncoder, self.held.use(TEXT))

    # What ComfyUI's CLIPTextEncode calls.

    def tokenize(self, text: str, **_: Any) -> dict[str, str]:
        return {"wancore": text}

    def encode_from_tokens_scheduled(self, tokens: dict[str, str], **_: Any) -> CONDITIONING:
        return self.encode([tokens["wancore"]])[0]


@dataclass(frozen=True)
class VisionOutput:
    """What ComfyUI's CLIPVisionEncode returns, as far as Wan models read it: features [B, N, C]."""

    penultimate_hidden_states: Tensor


class VisionSocket:
    """A CLIP vision encoder on a CLIP_VISION socket. It sees pictures as the command line's does."""

    def __init__(self, held: host.Held) -> None:
        self.patcher = self.held = held  # patcher: as of `ModelSocket`

    # What ComfyUI's CLIPVisionEncode calls.

    def encode_image(self, image: Tensor, crop: bool = True) -> VisionOutput:
        """image [B, H, W, 3] in 0..1. Raises OptionError where a part of it is to be cut off."""
        if crop:
            raise OptionError("Wan models see the whole picture: choose crop 'none' in CLIPVisionEncode")
        encoder = cast(VisionEncoder, self.held.use(0))
        pictures = 2 * image[..., :3].movedim(-1, 1).to(host.device(), torch.float32) - 1
        with torch.no_grad():
            return VisionOutput(host.to_intermediate(encoder(pictures)))


class VAESocket:
    """A video VAE on a VAE socket. Latents are un-normalised, pictures [F, H, W, 3] in 0..1."""

    latent_dim = 3
    output_channels = 3

    def __init__(self, held: host.Held) -> None:
        self.patcher = self.held = held  # patcher: as of `ModelSocket`
        self.config = cast(VAEConfig, held.part.part.config)
        self.latent_channels = self.config.z_dim

    def decode_to(
        self,
        samples: Tensor,
        report: Report,
        consume: Callable[[Pieces], Made],
        *,
        dtype: torch.dtype = torch.float32,
        tile: TileSpec | None,
        on_frames: Callable[[int, int], None],
        rest: str = "decode",
    ) -> Made:
        """Decode with this VAE and hand pictures to `consume`, see `images.decode_to`."""
        vae = self._use(*samples.shape[-2:])
        given = {"dtype": dtype, "tile": tile, "on_frames": on_frames, "rest": rest}
        return decode_to(vae, samples, report, consume, **given)

    def decode_images(
        self, samples: Tensor, report: Report, tile: TileSpec | None, on_frames: Callable[[int, int], None]
    ) -> Tensor:
        """Latents [B, C, T, Y, X] -> pictures [B * F, H, W, 3]."""
        images = torch.empty(images_shape(self.config, samples))
        collect = partial(collect_images, images=images)
        return self.decode_to(samples, report, collect, tile=tile, on_frames=on_frames)

    # What ComfyUI's own nodes call.

    def decode(self, samples: Tensor, *_: Any, **__: Any) -> Tensor:
        """[B, C, T, Y, X] -> [B, F, H, W, 3]."""
        return self._decode(samples, None)

    def decode_tiled(self, samples: Tensor, tile_x: int = 32, tile_y: int = 32, overlap: int = 8, **_: Any) -> Tensor:
        """Decode like `decode`, in tiles of `tile_y` x `tile_x` latent cells; time is streamed, never tiled."""
        return self._decode(samples, TileSpec(height=tile_y, width=tile_x, overlap=overlap))

    def encode(self, pixels: Tensor) -> Tensor:
        """[F, H, W, 3], or [1, F, H, W, 3] -> [1, C, T, Y, X]."""
        video = (pixels[0] if pixels.ndim == 5 else pixels)[..., :3]
        stride = self.config.spatial_stride
        return host.to_intermediate(encode_images(self._use(video.shape[1] // stride, video.shape[2] // stride), video))

    def encode_known(self, first: Tensor | None, last: Tensor | None, frames: int) -> tuple[Tensor, Tensor]:
        """The result of `known_frames`, with latents in place of its clip, which exists only on the device."""
        place = {"device": host.device(), "dtype": self.held.part.dtype}
        ends = (None if end is None else pixels_to_video(video_to_pixels(end)).to(**place) for end in (first, last))
        clip, unknown = known_frames(*ends, frames)
        stride = self.config.spatial_stride
        vae = self._use(clip.shape[3] // stride, clip.shape[4] // stride)
        return host.to_intermediate(encode_video(vae, clip)), unknown.float().cpu()

    def encode_tiled(self, pixels: Tensor, **_: Any) -> Tensor:
        return self.encode(pixels)

    def spacial_compression_decode(self) -> int:
        return self.config.spatial_stride

    def spacial_compression_encode(self) -> int:
        return self.config.spatial_stride

    def temporal_compression_decode(self) -> int:
        return self.config.temporal_stride

    def _decode(self, samples: Tensor, tile: TileSpec | None) -> Tensor:
        bar = host.Progress(1)
        images = self.decode_images(
            samples, Report(host.device()), tile, lambda done, total: bar.update(done, total, "")
        )
        return host.to_intermediate(images.unflatten(0, (samples.shape[0], -1)))

    def working_bytes(self, rows: int, columns: int) -> int:
        """Bytes of activations for decoding or encoding latents of `rows` x `columns`."""
        return vae_bytes(self.config, rows, columns, self.held.part.dtype.itemsize)

    def _use(self, rows: int, columns: int) -> VideoVAE:
        return cast(VideoVAE, self.held.use(self.working_bytes(rows, columns)))
