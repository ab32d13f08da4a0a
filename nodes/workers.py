"""What workers make of sockets: a VAE and a text encoder that run there, and the workers themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from wan_core.config import LoraOptions
from wan_core.execution.report import Report
from wan_core.models.text.tokenizer import TokenCount
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.wan.families.media import video_to_pixels
from wan_core.models.wan.families.wan.inputs import known_frames
from wan_core.pipeline.decode import Made, Pieces
from wan_core.pipeline.memory_planning import Workload
from wan_core.pipeline.run import OnStep
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.start import Leftover, Start
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import Workers
from wan_core.workers.options import WorkerOptions

from . import host
from .sockets import ModelSocket, TextSocket, VAESocket

WORKERS = io.Custom("WANCORE_WORKERS")  # WorkersSocket
UNCONNECTED = "unconnected"  # for `validate_inputs`, which gets None where `workers` is connected


def workers_input() -> Any:
    return WORKERS.Input(
        "workers",
        optional=True,
        tooltip="From the WanCore Launcher: several GPUs hold and run it together. Nothing connected: it runs here.",
    )


class WorkersSocket:
    """Workers, and what ComfyUI's memory manager sees of them. When nothing refers to them any more, they end."""

    def __init__(self, options: WorkerOptions) -> None:
        self.workers = workers = Workers(options)
        self.engine = WorkerEngine(workers, host.check_interruption)
        self.patcher = self.held = host.Remote(workers.stop, lambda: workers.is_running, options.devices)

    @property
    def device(self) -> torch.device:
        """The device of the first rank."""
        return torch.device(self.workers.options.devices[0])

    def ready(self, what: str, weights: int, working: int) -> WorkerEngine:
        """Their engine, for something whose weights take so many bytes on the first device, and `working` bytes beside
        them."""
        self.held.use(what, weights, working)
        return self.engine

    def sample(
        self,
        model: ModelSocket,
        workload: Workload,
        conditioning: Conditioning,
        start: Start,
        report: Report,
        on_step: OnStep,
        on_leftover: Callable[[Leftover], None],
    ) -> Tensor:
        """Sample in the workers, see `sample.sample_latents`."""
        count = len(self.workers.options.devices)
        loras = tuple(
            LoraOptions(path=str(one.key[0]), strength=one.strength, expert=expert)
            for expert, wanted in model.loras.items()
            for one in wanted
            if one.strength
        )
        weights, beside = sum(held.size for held in set(model.held.values())), model.plan(workload).beside
        working = max(beside[expert] for expert in workload.plan.experts)
        return self.ready("experts", weights, working).sample(
            asdict(replace(model.options, loras=loras)),
            workload.plan,
            conditioning.flat(),
            start=start,
            batched=workload.batched,
            report=report,
            fps=model.experts.task.fps,
            keep=host.unfinished_path(start.seed),
            on_step=on_step,
            on_leftover=on_leftover,
            on_phase=lambda phase: host.show(f"{phase}, on {count} workers ..."),
        )


class RemoteVAE(VAESocket):
    """A VAE whose pictures the workers share."""

    def __init__(self, held: host.Held, workers: WorkersSocket, spec: dict[str, Any]) -> None:
        super().__init__(held)
        self.workers, self.spec = workers, spec

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
        engine, tiles = self._ready(*samples.shape[-2:]), None if tile is None else asdict(tile)
        how = {"dtype": dtype, "tile": tiles, "on_frames": on_frames, "rest": rest}
        return engine.decode_to(self.spec, samples, report, consume, **how)

    def encode(self, pixels: Tensor) -> Tensor:
        video = (pixels[0] if pixels.ndim == 5 else pixels)[..., :3]
        stride = self.config.spatial_stride
        engine = self._ready(video.shape[1] // stride, video.shape[2] // stride)
        return host.to_intermediate(engine.encode(self.spec, video.contiguous()))

    def encode_known(self, first: Tensor | None, last: Tensor | None, frames: int) -> tuple[Tensor, Tensor]:
        clip, unknown = known_frames(first, last, frames)
        return self.encode(video_to_pixels(clip)), unknown

    def _ready(self, rows: int, columns: int) -> WorkerEngine:
        return self.workers.ready("vae", self.held.size, self.working_bytes(rows, columns))


class RemoteText(TextSocket):
    """A text encoder that one of the workers holds."""

    def __init__(self, held: host.Held, workers: WorkersSocket, spec: dict[str, Any]) -> None:
        super().__init__(held)
        self.workers, self.spec = workers, spec

    def encoder(self) -> Any:
        """The text encoder in the workers, with what `PromptCache` needs."""
        known: dict[str, TokenCount] = {}

        def encode(prompts: Sequence[str]) -> Tensor:
            alone = len(self.workers.workers.options.devices) == 1  # the last rank holds it, and only while it encodes
            engine = self.workers.ready("text", 0, self.held.size if alone else 0)
            rows, counts = engine.text(self.spec, prompts)
            known.update(zip(prompts, counts, strict=True))
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

        return SimpleNamespace(encode=encode, tokenizer=SimpleNamespace(count=known.__getitem__))
