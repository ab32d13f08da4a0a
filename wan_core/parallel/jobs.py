"""What the ranks do for a request: every rank the same, rank 0 has the answer.

A request carries everything that it needs, so ranks that were started anew answer it like those that had loaded the
models already; what is loaded stays until something else is asked for, or `release`.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wan_core.config import DiTConfig
from wan_core.denoise import Progress
from wan_core.images import decode_latents
from wan_core.job import make_job
from wan_core.latents import save_latents
from wan_core.parallel.costs import H200, MeshChoice, choose_mesh
from wan_core.parallel.mesh import Mesh, RankMesh
from wan_core.parallel.wire import load_options_from, report_data, request_from
from wan_core.parts import find_models
from wan_core.pipeline import OnStep, Pipeline
from wan_core.plan import Plan
from wan_core.report import Report

if TYPE_CHECKING:
    from wan_core.parallel.worker import Rank

Answer = tuple[dict[str, Any], dict[str, Tensor]]


class Jobs:
    """The models that this rank holds, and a method for each thing that can be asked."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.meshes: dict[Mesh, RankMesh] = {}
        self.pipeline: tuple[Any, Pipeline] | None = None

    def run(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        """Raises what goes wrong, and `Interrupted`."""
        asked: dict[str, Callable[..., Answer]] = {
            "generate": self.generate,
            "release": self.release,
        }
        return asked[header["op"]](header, tensors)

    def after_failure(self) -> None:
        """Give back what the failed request held."""
        gc.collect()
        if self.rank.device.type == "cuda":
            torch.cuda.empty_cache()

    def release(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answer:
        self.pipeline = None
        self.after_failure()
        return {}, {}

    # ----------------------------------------------------------------------------------------------------- a whole run

    def generate(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        """A video from a `Request`: frames uint8 [F, H, W, 3], latents, plan and report."""
        request = request_from(header["request"])
        self.phase("load")
        pipe = self._pipeline(header)
        job = pipe.prepare(request)
        self.rank.tell({"kind": "event", "name": "plan", "plan": asdict(job.plan)})
        self.phase("text")
        conditioning = pipe.encode(job)
        self.phase("denoise")
        latents = pipe.sample(job, conditioning, self.on_step(job.plan))
        self.keep(header["keep"], latents, job.fps, pipe.report)
        self.phase("decode")
        frames = decode_latents(pipe.fetch("vae", pipe.models.vae), latents, pipe.report)
        result = {"fps": job.fps, "plan": asdict(job.plan), "report": report_data(pipe.report)}
        return result, {"frames": torch.from_numpy(frames), "latents": latents.cpu()}

    def _pipeline(self, header: Mapping[str, Any]) -> Pipeline:
        """Loaded for these options; the one that is there, if it was made for the same."""
        options = load_options_from(header["options"], self.rank.device)
        request = request_from(header["request"])
        found = find_models(options, image=bool(request.image or request.last_image))
        job = make_job(request, found.task, found.dit, found.vae, found.of["high"].path, found.low_path)
        choice = self.choose(header["mesh"], found.dit, job.tokens, job.plan)
        key = json.dumps(asdict(options)), found.task.name, choice.mesh
        if self.pipeline is None or self.pipeline[0] != key:
            self.pipeline = None
            self.after_failure()
            pipe = Pipeline.load(options, request=request)
            pipe.loaded.notes.append(f"mesh: {choice.words()}")
            self.pipeline = key, pipe
        return self.pipeline[1]

    # ------------------------------------------------------------------------------------------------------- the mesh

    def choose(self, name: str, dit: DiTConfig, tokens: int, plan: Plan) -> MeshChoice:
        """The mesh that was named, or for "auto" the best one. Raises OptionError."""
        if name != "auto":
            return MeshChoice(Mesh.parse(name))
        paired = sum(2 for step in plan.steps if len(step.branches) == 2 and not step.skipped)
        return choose_mesh(
            self.rank.size,
            dit,
            tokens,
            paired=paired / max(1, plan.forwards),
            speeds=H200 if self.rank.device.type == "cuda" else None,
        )

    def mesh(self, mesh: Mesh) -> RankMesh:
        """Process groups are made once: they hold memory until the process ends."""
        if mesh not in self.meshes:
            self.meshes[mesh] = RankMesh.create(mesh, self.rank.device)
        return self.meshes[mesh]

    # ------------------------------------------------------------------------------------------------ what is told on

    def phase(self, name: str) -> None:
        """A part of the request begins; the place to stop between parts."""
        self.rank.beat(name)
        self.rank.agree()
        self.rank.tell({"kind": "event", "name": "phase", "phase": name})

    def on_step(self, plan: Plan, preview: bool = False) -> OnStep:
        """For `sample_latents`, on every rank: says how far it is, and stops all ranks if the user wants that.

        The host may be one step ahead of the GPU and not more: so an interruption takes effect within a step, and the
        GPU never waits for the host.
        """
        behind: list[Callable[[], None]] = []

        def note(progress: Progress, seconds: float | None) -> None:
            picture = _middle(progress.preview()) if preview and self.rank.rank == 0 else None
            ready = None
            if self.rank.device.type == "cuda":
                ready = torch.cuda.Event()
                ready.record()

            def say() -> None:
                if ready is not None:
                    ready.synchronize()
                done = progress.step.index + 1
                self.rank.beat(f"denoise {progress.step.expert}", done, progress.total)
                self.rank.tell(
                    {
                        "kind": "event",
                        "name": "step",
                        "step": progress.step.index,
                        "forwards": progress.forwards,
                        "seconds": seconds,
                    },
                    {} if picture is None else {"preview": picture.float().cpu()},
                )

            behind.append(say)
            last = progress.step.index + 1 == progress.total
            while behind and (ready is None or last or len(behind) > 1):
                behind.pop(0)()
            self.rank.agree()

        return note

    def keep(self, path: str | None, latents: Tensor, fps: int, report: Report) -> None:
        """Rank 0: write finished latents to `path` before anything else can go wrong. A disk that is full is told, and
        the run goes on: the latents are still here."""
        if path is None or self.rank.rank != 0:
            return
        self.rank.beat("save latents")
        try:
            save_latents(Path(path), latents, fps, report.settings)
        except OSError as fault:
            report.notes.append(f"the finished latents could not be kept in {path}: {fault}")
            self.rank.tell({"kind": "event", "name": "not kept", "path": path, "text": str(fault)})
        else:
            self.rank.tell({"kind": "event", "name": "kept", "path": path})


def _middle(latents: Tensor) -> Tensor:
    """The middle latent frame [1, C, 1, Y, X] of the first video, of which previews are drawn."""
    middle = latents.shape[2] // 2
    return latents[:1, :, middle : middle + 1].clone()
