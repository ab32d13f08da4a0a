"""The launcher and its workers: sockets whose models several GPUs hold, and these GPUs under ComfyUI's memory
manager."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from wan_core.cluster.connect import Wanted, check_allowed
from wan_core.cluster.ranks import cluster_workers
from wan_core.config import LoraOptions
from wan_core.execution.report import Report
from wan_core.media.feed import Feed
from wan_core.models.text.tokenizer import TokenCount
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.wan.families.media import video_to_pixels
from wan_core.models.wan.families.wan.inputs import NO_KEYFRAMES, known_frames
from wan_core.pipeline.decode import Made, Pieces, in_this_mode
from wan_core.pipeline.run import OnStep
from wan_core.sampling.plan import Plan
from wan_core.sampling.start import Leftover
from wan_core.workers.client import WorkerEngine, on_steps, warn_not_kept
from wan_core.workers.launcher import Workers
from wan_core.workers.options import ALLOW_CPU, WorkerOptions, parse_devices

from . import host
from .memory import ModelSocket, Sampling, plan_experts
from .schema import ADVANCED, output, schema, socket_type
from .sockets import TextSocket, VAESocket

UNCONNECTED = "unconnected"  # for `validate_inputs`, which gets None where `workers` is connected


def workers_input() -> Any:
    return WORKERS.Input(
        "workers",
        display_name="several GPUs",
        optional=True,
        tooltip="From the WanCore Launcher: several GPUs hold and run it together. Nothing connected: it runs here.",
    )


def device_of(workers: WorkersSocket | None) -> torch.device:
    """Where models run; that of the first rank."""
    return host.device() if workers is None else workers.device


class WorkersSocket:
    """Workers. When nothing refers to them any more, they end."""

    def __init__(self, workers: Workers) -> None:
        self.workers, devices = workers, workers.options.devices if workers.options.here else (host.CLUSTER,)
        self.engine = WorkerEngine(workers, host.check_interruption)
        self.patcher = host.Remote(workers.stop, lambda: workers.is_running, devices)

    @property
    def device(self) -> torch.device:
        return torch.device(self.workers.options.devices[0] if self.workers.options.here else "cpu")

    def ready(self, what: str, weights: int, working: int) -> WorkerEngine:
        """Their engine, for something whose weights take so many bytes on the first device, and `working` bytes beside
        them."""
        self.patcher.use(what, weights, working)
        return self.engine


WORKERS = socket_type("WANCORE_WORKERS", WorkersSocket)


def file_of_part(patcher: host.Held, precision: str) -> dict[str, str]:
    """A model of one part, for the methods of `Jobs`."""
    return {"path": str(patcher.part.part.path), "precision": precision}


class WorkersText(TextSocket):
    """A UMT5 encoder that the workers hold."""

    def __init__(self, patcher: host.Held, precision: str, workers: WorkersSocket) -> None:
        super().__init__(patcher)
        self.file, self.workers = file_of_part(patcher, precision), workers

    def read(self, prompts: Sequence[str]) -> tuple[list[Tensor], Sequence[TokenCount]]:
        alone = len(self.workers.workers.options.devices) == 1  # the last rank holds it, and only while it encodes
        engine = self.workers.ready("text", 0, self.patcher.size if alone else 0)
        rows, counts = engine.ask(tuple[Tensor, tuple[TokenCount, ...]], "text", self.file, prompts=list(prompts))
        return [row[: count.read] for row, count in zip(rows, counts, strict=True)], counts


class WorkersVAE(VAESocket):
    """A VAE that the workers hold."""

    def __init__(self, patcher: host.Held, precision: str, workers: WorkersSocket) -> None:
        super().__init__(patcher)
        self.file, self.workers = file_of_part(patcher, precision), workers

    def _engine(self, rows: int, columns: int) -> WorkerEngine:
        return self.workers.ready("vae", self.patcher.size, self.working_bytes(rows, columns))

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        return self._engine(*self.latent_size(pixels)).ask(Tensor, "encode", self.file, images=pixels.contiguous())

    def encode_known(
        self, first: Tensor | None, last: Tensor | None, frames: int, keyframes: Mapping[int, Tensor] = NO_KEYFRAMES
    ) -> tuple[Tensor, Tensor]:
        clip, unknown = known_frames(first, last, frames, keyframes)
        return host.to_intermediate(self.encode_pixels(video_to_pixels(clip))), unknown

    def decode_to(
        self,
        samples: Tensor,
        report: Report,
        consume: Callable[[Pieces], Made],
        *,
        dtype: torch.dtype,
        tile: TileSpec | None,
        on_frames: Callable[[int, int], None],
        rest: str = "decode",
    ) -> Made:
        with Feed(in_this_mode(consume)) as feed:

            def piece(first: int, images: Tensor) -> None:
                feed.put((first, images))

            events = {"piece": piece, "frames": lambda done, total: on_frames(done, total)}
            sent = {"latents": samples, "uint8": dtype == torch.uint8, "tile": tile}
            self._engine(*samples.shape[-2:]).ask(None, "decode", self.file, report, events, **sent)
            with report.phase(rest):
                return feed.finish()


@dataclass(frozen=True, eq=False, kw_only=True)
class WorkersModel(ModelSocket):
    """Experts that the workers read, with their LoRAs, when they need them; each says there what cannot run."""

    workers: WorkersSocket

    def read_ahead(self) -> None:
        pass

    def check(self, plan: Plan, shape: tuple[int, ...]) -> None:
        pass

    def sample(self, run: Sampling, on_step: OnStep, on_leftover: Callable[[Leftover], None]) -> Tensor:
        plan, count = run.plan, len(self.workers.workers.options.devices)
        loras = tuple(
            LoraOptions(path=str(one.key[0]), strength=one.strength, expert=expert)
            for expert, expert_loras in self.loras.items()
            for one in expert_loras
            if one.strength
        )
        weights = sum(patcher.size for patcher in set(self.patchers.values()))
        activation_bytes = plan_experts(self, plan).beside
        working = max(activation_bytes[expert] for expert in plan.experts)
        events = {
            "phase": lambda phase: host.show(f"{phase}, on {count} workers ..."),
            "not kept": warn_not_kept,
            "step": on_steps([plan], on_step),
        }
        latents, leftover = self.workers.ready("experts", weights, working).sample(
            replace(self.options, loras=loras),
            run.report,
            events,
            keep=host.unfinished_path(run.start.seed),
            fps=self.experts.task.fps,
            plan=plan,
            conditioning=run.conditioning.flat(),
            start=run.start,
        )
        if leftover is not None:
            on_leftover(leftover)
        return latents


class WanCoreLauncher(io.ComfyNode):
    """Several GPUs for everything downstream of its output."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreLauncher",
            "WanCore Launcher",
            aliases="multi gpu, xdit, ulysses, parallel, distributed",
            shows_text=True,
            description="Starts one worker process for each GPU. Connect it to the loaders: sampling, decoding and "
            "text then run there, on all GPUs together.",
            inputs=[
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="'auto': every GPU. Otherwise how many, or which: '4', '0,1', '2,3'. 'cpu,cpu' works "
                    "without a GPU, to try it out.",
                ),
                io.String.Input(
                    "mesh",
                    **ADVANCED,
                    default="auto",
                    tooltip="How the GPUs share the work: guidance x ring x ulysses, for example '2x1x2' for four. "
                    "'auto' shares guidance first, then the tokens of the video.",
                ),
                io.Int.Input(
                    "start_timeout",
                    **ADVANCED,
                    default=300,
                    min=5,
                    max=86400,
                    tooltip="Seconds until all workers must be there.",
                ),
                io.Int.Input(
                    "step_timeout",
                    **ADVANCED,
                    default=600,
                    min=5,
                    max=86400,
                    tooltip="Seconds after which workers that get no further are ended, and an error says where each "
                    "of them was. Must be longer than loading the models, and than one step.",
                ),
                io.String.Input(
                    "cluster",
                    **ADVANCED,
                    default="",
                    optional=True,
                    tooltip="Empty: this machine's GPUs. Otherwise those of a Ray cluster: 'auto' or HOST:PORT, one of "
                    "those that ComfyUI was started with (docs/cluster.md). Devices are then how many GPUs.",
                ),
            ],
            outputs=[
                output(WORKERS, "workers", "For the WanCore loaders."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        devices: str | None = None,
        mesh: str | None = None,
        start_timeout: int | None = None,
        step_timeout: int | None = None,
        cluster: str | None = None,
    ) -> bool:
        if devices is not None:
            timeouts = {"start_timeout": start_timeout, "step_timeout": step_timeout}
            known = {name: seconds for name, seconds in timeouts.items() if seconds is not None}
            if cluster and cluster.strip():
                check_allowed(cluster.strip())
                Wanted.parse(devices)
            else:
                WorkerOptions(devices=_devices_here(devices), mesh=_mesh("auto" if mesh is None else mesh), **known)
        return True

    @classmethod
    def execute(cls, devices: str, mesh: str, cluster: str = "", **timeouts: float) -> io.NodeOutput:
        address = cluster.strip()
        if address:
            check_allowed(address)
            workers = cluster_workers(address, devices, mesh=_mesh(mesh), **timeouts)
        else:
            workers = Workers(WorkerOptions(devices=_devices_here(devices), mesh=_mesh(mesh), **timeouts))
        socket = WorkersSocket(workers)
        socket.patcher.begin()
        workers.start()  # they come up while other nodes work
        where = f", on the cluster {address}" if address else ""
        names = workers.options.devices
        return io.NodeOutput(socket, ui=ui.PreviewText(f"{len(names)} workers: {', '.join(names)}{where}"))


def _mesh(text: str) -> str:
    return text.strip().lower()


def _devices_here(devices: str) -> tuple[str, ...]:
    return parse_devices(devices, torch.cuda.device_count(), cpu=os.environ.get(ALLOW_CPU) == "1")
