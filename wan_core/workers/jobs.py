"""What the ranks do for a request: every rank the same, rank 0 has the answer.

A request carries everything that it needs, so ranks that were started anew answer it like those that had loaded the
models already; what is loaded stays until something else is asked for, or `release`.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from wan_core.checkpoint import load_text_encoder, load_vae
from wan_core.checkpoint.save import try_to_save_latents
from wan_core.checkpoint.staged import Reading
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import optimize_vae
from wan_core.execution.report import Report, device_name
from wan_core.models.text.tokenizer import TokenCount
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.vae.vae import VideoVAE
from wan_core.ops.attention.registry import BACKENDS
from wan_core.parallel.chords import check_chords
from wan_core.parallel.conditioning import text_of_all, text_rank
from wan_core.parallel.layers import check_layers
from wan_core.parallel.mesh import Mesh, RankMesh, auto_mesh
from wan_core.parallel.sequence import check_mesh
from wan_core.parallel.weights import shared_checkpoint
from wan_core.pipeline.check import check_request
from wan_core.pipeline.decode import Pieces, decode_to
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.encode import encode_images
from wan_core.pipeline.kept_steps import KeptLatents, reached_of_all
from wan_core.pipeline.load import Models, load_models
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import COMPILING, OnStep, OwnMemory, Watch, guidance_mode
from wan_core.pipeline.settings import PartToLoad, compute_dtype, find_attention, holding, precision_of
from wan_core.pipeline.sources import find_experts, recognise
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Progress
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.run import check_kernel
from wan_core.sampling.start import Leftover, Start
from wan_core.workers.rank import BetweenBlocks, Rank, agreements
from wan_core.workers.wire import call, pack

Answer = tuple[dict[str, Any], dict[str, Tensor]]
Made = TypeVar("Made")


class Jobs:
    """The models that this rank holds, and a method for each thing that can be asked. All ranks call it alike, and rank
    0 sends what it returns. `models`: what it loads, with paths."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.meshes: dict[Mesh, RankMesh] = {}
        self.held: dict[str, tuple[str, Any]] = {}  # kind of models -> what they were made from, and they
        self.files: Any = None  # of this request: those of its models, as they are now
        self.wanted = "auto"  # the mesh that this request names
        self.report = Report(rank.device)

    def run(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        """A request by its packed arguments. Raises what goes wrong, and `Interrupted`."""
        methods = {
            method.__name__: method for method in (self.generate, self.sample, self.decode, self.encode, self.text)
        }
        arguments = {name: value for name, value in header.items() if name not in ("op", "number", "files", "mesh")}
        self.files, self.wanted = header["files"], header["mesh"]
        self.report, begin, sent = Report(self.rank.device), time.perf_counter(), dict[str, Tensor]()
        made = pack(call(methods[header["op"]], arguments, tensors), sent, "result")
        self.report.add_rest("prepare", time.perf_counter() - begin)
        device = device_name(self.rank.device)
        report = replace(self.report, device=torch.device("cpu"), workers=device)  # goes on with the program's clock
        return {"result": made, "report": pack(report, sent, "report")}, sent

    # ------------------------------------------------------------------------------------------------ what is loaded

    def hold(self, kind: str, spec: Any, make: Callable[[], Made]) -> Made:
        """The models of a kind, made from `spec`. Those that were made from another go first: both may not fit."""
        key = json.dumps([spec, self.files], sort_keys=True)
        if kind not in self.held or self.held[kind][0] != key:
            self.held.pop(kind, None)
            self.clean()
            self.rank.progress("load")
            self.rank.event("phase", phase="load")
            self.held[kind] = key, make()
        return self.held[kind][1]

    def clean(self) -> None:
        gc.collect()
        if self.rank.device.type == "cuda":
            torch.cuda.empty_cache()

    # ----------------------------------------------------------------------------------------------------- a whole run

    def generate(
        self, models: LoadOptions, request: Request, keep: str | None, must_keep: bool, keep_clips: Path | None
    ) -> tuple[Tensor, int, Plan, tuple[Path, ...]]:
        """A video: latents, frames per second, plan and kept clips. Its frames are sent as events."""
        models = replace(models, device=str(self.rank.device))
        job = check_request(models, request, self.rank.device)
        options, found = job.options, job.models
        assert options is not None and found is not None
        if must_keep:
            job.check_saved()
        mesh = self.choose(options, found, job.plan)

        def load() -> Pipeline:
            return Pipeline.load_checked(job, Report(self.rank.device), ranks=self.mesh(mesh))

        pipe = self.hold("pipeline", [asdict(options), found.task.name, str(mesh)], load)
        pipe.checked = job

        def planned(plan: Plan) -> None:
            self.rank.event("plan", plan=plan)

        between = BetweenBlocks(self.rank, agreements(job.plan, mesh, found.dit.num_layers))
        step, phase = self.on_step(between), partial(self.phase, models=pipe.models)
        made = pipe.generate(
            request,
            Watch(
                planned=planned,
                phase=phase,
                step=step,
                checks=between,
                latents=lambda latents: self.keep(keep, latents, job.fps, pipe.report),
                keep_clips=keep_clips,
                write=self.send_video if self.rank.rank == 0 else None,
            ),
        )
        self.report = made.report
        return made.latents, made.fps, made.plan, made.kept_clips

    # ---------------------------------------------------------------------------------- the parts, for a graph of nodes

    def sample(
        self,
        models: LoadOptions,
        plan: Plan,
        conditioning: dict[str, Tensor],
        start: Start,
        fps: int,
        keep: str | None,
        keep_step: Path | None,
        key: str,
        settings: dict[str, Any],
    ) -> tuple[Tensor, Leftover | None]:
        """Un-normalised latents float32 on the CPU, and what another run can go on with. conditioning: as
        `Conditioning.flat` has it. keep: where the latents are written, with these settings, before they are sent.
        keep_step, key: see `KeptLatents`."""
        options, report = replace(models, device=str(self.rank.device)), self.report
        assert options.high is not None
        with report.phase("check files"):
            named = options.high, options.low
            found = self.hold("recognised", named, partial(find_experts, *named))
            mesh = self.choose(options, found, plan)
        ranks = self.mesh(mesh)
        mode, why = guidance_mode(plan.guidance_mode, plan, ranks)
        plan = replace(plan, guidance_mode=mode)
        with report.phase("load"):
            loaded, notes = self.experts(options, found, plan, ranks)
        loaded.check_changes(plan)
        loaded.place(plan)
        report.settings["mesh"] = str(mesh)
        report.settings["guidance_mode"] = mode
        report.notes += [f"guidance: {mode} ({why})"] * plan.guided
        report.notes += [f"mesh: {mesh.describe()}", *notes]
        loaded.wait_for_kernels(report)
        self.phase("denoise", loaded)
        between = BetweenBlocks(self.rank, agreements(plan, mesh, found.dit.num_layers))
        leftovers: list[Leftover] = []
        kept = KeptLatents(keep_step, key, report.warn) if keep_step is not None and self.rank.rank == 0 else None
        latents = sample_latents(
            plan,
            OwnMemory(loaded, report),
            Conditioning.of({name: value.to(self.rank.device) for name, value in conditioning.items()}),
            start.sample(plan, found.vae, self.rank.device),
            found.vae,
            report,
            start=start,
            on_leftover=leftovers.append,
            on_step=self.on_step(between, preview=True),
            checks=between,
            ranks=ranks,
            kept=kept,
            reached=reached_of_all(kept, ranks, plan, start.shape, self.rank.device),
        )
        with report.phase("save latents"):
            self.keep(keep, latents, fps, report, settings)
        return latents.cpu(), leftovers[0].to(torch.device("cpu")) if leftovers else None

    def experts(self, options: LoadOptions, found: Parts, plan: Plan, ranks: RankMesh) -> tuple[Models, Sequence[str]]:
        """The transformers alone, shared over `ranks`, and the notes of loading them."""

        def load() -> tuple[Models, Sequence[str]]:
            report = Report(self.rank.device)
            return load_models(found, options, report, plan, ranks), report.notes

        if "experts" in self.held and not self.held["experts"][1][0].fits(ranks):
            del self.held["experts"]
        loaded, notes = self.hold("experts", asdict(options), load)
        arranged = loaded.at_speed(plan.speed, ranks), notes
        self.held["experts"] = self.held["experts"][0], arranged
        return arranged

    def decode(self, models: dict[str, Any], latents: Tensor, uint8: bool, tile: TileSpec | None) -> None:
        """Latents [B, C, T, Y, X] to pictures [F, H, W, 3], which are sent as events while others are decoded."""
        vae = self.vae(models)
        self.phase("decode")

        def send(pieces: Pieces) -> None:
            for first, images in pieces:
                self.rank.event("piece", first=first, images=images)

        latents, dtype = latents.to(self.rank.device), torch.uint8 if uint8 else torch.float32
        decode_to(vae, latents, self.report, send, dtype=dtype, tile=tile, on_frames=self.on_frames)

    def encode(self, models: dict[str, Any], images: Tensor) -> Tensor:
        """Pictures [F, H, W, 3] in 0..1 to latents float32 [1, C, T, Y, X]."""
        vae = self.vae(models)
        self.phase("encode")
        return encode_images(vae, images.to(self.rank.device))

    def vae(self, models: Mapping[str, Any]) -> VideoVAE:
        def load() -> VideoVAE:
            part, device = recognise(Path(models["path"]), "vae", load_vae), self.rank.device
            how = Reading(share=partial(shared_checkpoint, ranks=self.everyone))
            loaded = PartToLoad(part, compute_dtype(models["precision"], device)).load(device, how=how)
            return optimize_vae(cast(VideoVAE, loaded), device, self.everyone)

        return self.hold("vae", models, load)

    def text(self, models: dict[str, Any], prompts: tuple[str, ...]) -> tuple[Tensor, tuple[TokenCount, ...]]:
        """Prompts to rows [B, L, dim], zeros at the end, and their tokens. One rank has the encoder."""
        device, read = self.rank.device, None
        self.phase("text")
        if self.rank.rank == text_rank(self.everyone):
            dtype = compute_dtype(models["precision"], device)

            def load() -> Residency:
                # Needed for a moment, and large: its weights stay in host memory and come when they are used.
                residency = Residency(device, "swap" if device.type == "cuda" else "resident")
                part = recognise(Path(models["path"]), "text_encoder", load_text_encoder)
                held = holding(part, None, models["precision"] == "checkpoint", device)
                residency.add("text encoder", PartToLoad(part, dtype, held).load(residency.load_device))
                return residency

            residency = self.hold("text encoder", models, load)
            encoder = cast(TextEncoder, residency.use("text encoder"))
            read = encoder.read(prompts)
            residency.release("text encoder")
        rows, counts = text_of_all(self.everyone, read, len(prompts))
        return rows.cpu(), tuple(counts)

    # ------------------------------------------------------------------------------------------------------- the mesh

    def choose(self, options: LoadOptions, models: Parts, plan: Plan) -> Mesh:
        """The mesh that the request names, or for "auto" the best one for `plan`. Raises OptionError."""
        dit, device = models.dit, self.rank.device
        tokens = dit.tokens(*plan.latent_shape[2:])
        precision, _ = precision_of(options.precision, models.high, device, models.low)
        dtype = compute_dtype(precision, device)
        backend, _ = find_attention(options.attention, dit, dtype, device, plan.speed)
        if plan.sparse is not None:
            check_kernel(plan.sparse, backend, device, dit.head_dim, tokens)
        if self.wanted == "auto":
            paired = sum(step.forwards for step in plan.steps if step.computed == 2) / max(1, plan.forwards)
            rings, on_host = BACKENDS[backend].gives_lse and plan.sparse is None, self.rank.on_host
            mesh = auto_mesh(self.rank.size, dit.num_heads, paired=paired, rings=rings, gpus_per_host=on_host)
        else:
            mesh = Mesh.parse(self.wanted)
            if mesh.size != self.rank.size:
                raise OptionError(f"mesh {mesh} needs {mesh.size} ranks, and there are {self.rank.size}")
        check_mesh(mesh, backend, tokens, plan.sparse)
        check_layers(mesh, dit, plan)
        if mesh.time > 1:
            check_chords(plan, mesh.time)
        return mesh

    def mesh(self, mesh: Mesh) -> RankMesh:
        """Process groups are made once: they hold memory until the process ends."""
        if mesh not in self.meshes:
            self.meshes[mesh] = RankMesh.create(mesh, self.rank.device, timeout=self.rank.timeout)
        return self.meshes[mesh]

    @property
    def everyone(self) -> RankMesh:
        """All ranks, for what does not care how a transformer is shared."""
        return next(iter(self.meshes.values())) if self.meshes else self.mesh(Mesh(ulysses=self.rank.size))

    # ------------------------------------------------------------------------------------------------ what is told on

    def phase(self, name: str, models: Models | None = None) -> None:
        """A part of the request begins; the place to stop between parts. models: that it runs."""
        self.rank.progress(name)
        self.rank.raise_if_interrupted()
        if name == "denoise" and models is not None and models.compiles:
            self.rank.progress(COMPILING)
        self.rank.event("phase", phase=name)

    def on_step(self, between: BetweenBlocks, preview: bool = False) -> OnStep:
        """For `sample_latents`, on every rank: says how far it is, and stops all ranks if the user wants that. The host
        may be one step ahead of the GPU and not more, so that what it says is true. The GPU never waits for it."""
        behind: list[Callable[[], None]] = []

        def note(progress: Progress, seconds: float | None) -> None:
            picture = _first(progress.preview()) if preview and self.rank.rank == 0 else None
            ready = None  # on a GPU: when this step has run and its picture has arrived
            if self.rank.device.type == "cuda":
                ready = torch.cuda.Event()
                ready.record()

            def say() -> None:
                if ready is not None:
                    ready.synchronize()
                done = progress.step.index + 1
                self.rank.progress(f"denoise {progress.step.expert}", done, progress.total)
                self.rank.event(
                    "step",
                    index=progress.step.index,
                    forwards=progress.forwards,
                    seconds=seconds,
                    preview=picture,
                    clip=progress.clip,
                    later=progress.later,
                )

            behind.append(say)
            last = progress.step.index + 1 == progress.total
            while behind and (ready is None or last or len(behind) > 1):
                behind.pop(0)()
            between.end_step()

        return note

    def on_frames(self, done: int, total: int) -> None:
        self.rank.progress("decode", done, total)
        self.rank.raise_if_interrupted()
        self.rank.event("frames", done=done, total=total)

    def send_video(self, frames: Iterator[np.ndarray], /, *, fps: int, settings: Mapping[str, Any]) -> None:
        """For `Pipeline.generate`: each frame uint8 [H, W, 3] as soon as it is decoded."""
        self.rank.event("video", fps=fps, settings=settings)
        for frame in frames:
            self.rank.event("frame", frame=torch.from_numpy(frame))

    def keep(
        self, path: str | None, latents: Tensor, fps: int, report: Report, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Rank 0: write finished latents to `path` before anything else can go wrong; the program hears of a fault."""
        if path is None or self.rank.rank != 0:
            return
        self.rank.progress("save latents")
        failed = try_to_save_latents(path, latents, fps, report.settings if settings is None else settings)
        if failed is None:
            self.rank.event("kept", path=path)
        else:
            report.notes.append(failed)
            self.rank.event("not kept", path=path, text=failed)


def _first(latents: Tensor) -> Tensor:
    """The first video float32 [1, C, T, Y, X], of which previews are drawn, on the CPU. From a GPU it is still on its
    way: waiting for it would mean waiting for all that was launched since."""
    video = latents[:1].float()
    host = torch.empty(video.shape, pin_memory=video.is_cuda)
    return host.copy_(video, non_blocking=True)
