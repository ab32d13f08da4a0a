"""Guided steps of the sampling loop in suite `parallel`: on one GPU, and on whole meshes. What single forwards cannot
show is there too: layers that follow each other, and parallel steps.

Both experts stay on the device, text is random, nothing is decoded. All rows use Euler and the same noise. Each row is
run once with few steps, which are not counted, and then `--runs` (1) times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.always_sparse import AlwaysSparse
from benchmarks.cases import EXPERTS, parse_size
from benchmarks.measure import make_room, relative_error, settle
from benchmarks.ranks import Ranks
from benchmarks.rows import Row, guarded
from benchmarks.setups import Setup, find_setup
from wan_core.checkpoint.staged import Reading
from wan_core.config import OptionError, check_size
from wan_core.execution.report import GIB, Report
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.families import choose_task
from wan_core.models.wan.model import WanModel
from wan_core.parallel.layers import check_layers, held_layers
from wan_core.parallel.mesh import Mesh, RankMesh
from wan_core.parallel.ulysses import all_to_all
from wan_core.pipeline.sample import sample_latents
from wan_core.sampling.chords import BEGINNINGS, Stretches, check_chords
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import choose_batched
from wan_core.sampling.plan import Expert, Plan, make_plan

WARM_STEPS = 2
SENT = 256 * 2**20  # bytes that the links are measured with
SENT_CPU = 2**20
SENDS = 10


def trajectory_rows(ranks: Ranks) -> Iterator[Row]:
    yield from link_rows(ranks)
    for setup in map(find_setup, ranks.given["setups"]):
        for size in ranks.sizes:
            yield from Trajectories(ranks, setup, size).rows()


def link_name(device: torch.device) -> str:
    """How ranks of this host reach each other, as far as the environment and the driver say."""
    if device.type != "cuda":
        return "gloo"
    if os.environ.get("NCCL_P2P_DISABLE") == "1" or not torch.cuda.can_device_access_peer(0, 1):
        return "network sockets" if os.environ.get("NCCL_SHM_DISABLE") == "1" else "through host memory"
    return "peer access"


def link_rows(ranks: Ranks) -> Iterator[Row]:
    """gb_s: what leaves one GPU, 1e9 bytes a second, as `costs.Speeds.link` means it."""
    world, count = ranks.world.world, ranks.count
    size = (SENT if ranks.device.type == "cuda" else SENT_CPU) // count * count
    out = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
    into, parts = torch.empty_like(out), [size // count] * count

    def send() -> None:
        if world.index == 0:
            dist.send(out, 1)
        elif world.index == 1:
            dist.recv(into, 0)

    def exchange() -> None:
        all_to_all(into, out, parts, parts, world)

    sends: tuple[tuple[str, Callable[[], None], int], ...] = (
        ("link: rank 0 sends to rank 1", send, size),
        (f"link: all-to-all of {count}", exchange, size // count * (count - 1)),
    )
    for name, run, leaving in sends:

        def made(run: Callable[[], None] = run, leaving: int = leaving) -> Row:
            run()
            seconds = timed(ranks, lambda: [run() for _ in range(SENDS)]) / SENDS
            return {"seconds": round(seconds, 6), "gb_s": round(leaving / seconds / 1e9, 3), "mib": size // 2**20}

        yield guarded(name, ranks.sizes[0], None, made) | {"link": link_name(ranks.device)}


def timed(ranks: Ranks, run: Callable[[], Any]) -> float:
    """Seconds until the slowest rank has run it."""
    ranks.wait()
    settle(ranks.device)
    begin = time.perf_counter()
    run()
    settle(ranks.device)
    return ranks.world.agree(time.perf_counter() - begin)


@dataclass
class Trajectories:
    """The rows of one setup and size. Every method that yields or measures runs on each rank, but for one GPU's row."""

    ranks: Ranks
    setup: Setup
    size: str

    def __post_init__(self) -> None:
        self.exact: Tensor | None = None  # on the first rank: the latents of one GPU
        self.single: float | None = None
        self.blocks = 0  # of an expert

    def rows(self) -> Iterator[Row]:
        steps, reason = self.ranks.given["steps"], self.setup.why_not(self.ranks.device, self.ranks.dtype)
        if reason is not None:
            yield guarded(f"{self.setup.name}, {steps} steps", self.size, reason, dict)
            return
        experts, vae = self._experts(None)
        row = self._row(experts, vae, None) if self.ranks.first else {}
        self.ranks.wait()
        yield row
        for mesh in whole_meshes(self.ranks.count, experts["high"].config.num_heads):
            if mesh.layers > 1:  # the last one: its ranks hold other weights
                self._drop(experts)
                experts, vae = self._experts(mesh)
            yield self._row(experts, vae, mesh)
        self._drop(experts)

    def _drop(self, experts: dict[Expert, WanModel]) -> None:
        while experts:
            AlwaysSparse.remove(
                experts.popitem()[1]
            )  # ranks keep what exchanges tokens, and it would keep its attention
        make_room(self.ranks.device)

    def _experts(self, mesh: Mesh | None) -> tuple[dict[Expert, WanModel], VAEConfig]:
        """Both, with the blocks that this rank holds in `mesh`; and the VAE whose latents they make."""
        layers = None
        if mesh is not None:
            layers = held_layers(self.blocks, self.ranks.on(mesh))
        how = Reading(layers=layers)
        experts: dict[Expert, WanModel] = {name: self.ranks.plain(self.setup, name, how)[0] for name in EXPERTS}
        self.blocks = len(experts["high"].blocks)
        return experts, choose_task(experts["high"].config).task.vae

    def _row(self, experts: dict[Expert, WanModel], vae: VAEConfig, mesh: Mesh | None) -> Row:
        steps = self.ranks.given["steps"]
        name = f"{self.setup.name}, {steps} steps, {'1 GPU' if mesh is None else mesh}"
        plan, model = euler(steps), experts["high"]
        return guarded(name, self.size, self._why_not(mesh, model, plan), lambda: self._run(experts, vae, mesh, plan))

    def _why_not(self, mesh: Mesh | None, model: WanModel, plan: Plan) -> str | None:
        if mesh is None:
            return None
        if self.setup.keep < 1 and (mesh.layers > 1 or mesh.time > 1):
            return f"mesh {mesh} does not go with sparse attention"
        try:
            check_layers(mesh, model.config, plan)
            if mesh.time > 1:
                check_chords(plan, mesh.time)
        except OptionError as fault:
            return str(fault)
        return None

    def _run(self, experts: dict[Expert, WanModel], vae: VAEConfig, mesh: Mesh | None, plan: Plan) -> Row:
        on = None if mesh is None else self.ranks.on(mesh)
        for model in experts.values():
            self.setup.apply(model, ranks=on)
        loop = Loop(experts, vae, on, self.size, self.ranks.device)
        with self.setup.running():
            loop.run(euler(warm_steps(1 if mesh is None else mesh.time, len(plan.steps))))
            runs = [self._time(loop, plan, alone=mesh is None) for _ in range(self.ranks.given["step_runs"])]
        seconds, peak = median(runs), loop.peak / GIB
        row: Row = {"tokens": loop.tokens, "steps": len(plan.steps), "gpus": 1 if mesh is None else self.ranks.count}
        row |= {"seconds": round(seconds, 5), "spread": round(max(runs) - min(runs), 5)}
        row |= {"seconds_per_step": round(seconds / len(plan.steps), 5), "peak_gib": round(peak, 3)}
        if mesh is None:
            self.exact, self.single = loop.latents, seconds
            return row
        row |= {"mesh": str(mesh), "link": link_name(self.ranks.device)}
        row["peak_gib_most"] = round(self.ranks.world.agree(peak), 3)
        if mesh.time > 1:
            row["steps_in_a_row"] = Stretches.of(mesh.time, len(plan.steps)).forwards
        if self.exact is not None and self.single is not None:
            row |= {"error": relative_error(loop.latents, self.exact), "exact": mesh.time == 1}
            row |= {
                "ratio": round(self.single / seconds, 4),
                "ratio_to": f"{self.setup.name}, {len(plan.steps)} steps, 1 GPU",
            }
        return row

    def _time(self, loop: Loop, plan: Plan, *, alone: bool) -> float:
        if not alone:
            return timed(self.ranks, lambda: loop.run(plan))
        settle(self.ranks.device)
        begin = time.perf_counter()
        loop.run(plan)
        settle(self.ranks.device)
        return time.perf_counter() - begin


class Loop:
    """The sampling loop of one mesh. run leaves `latents`, and `peak`: bytes on this rank's device."""

    latents: Tensor
    peak: int

    def __init__(
        self, experts: dict[Expert, WanModel], vae: VAEConfig, ranks: RankMesh | None, size: str, device: torch.device
    ) -> None:
        config, generator = experts["high"].config, torch.Generator().manual_seed(0)
        shape = latent_shape(size, vae)
        self.experts, self.vae, self.ranks, self.device = experts, vae, ranks, device
        self.noise, self.tokens = draw_noise(0, shape).to(device), shape[2] * shape[3] * shape[4] // 4
        dtype = experts["high"].patch_embedding.weight.dtype
        rows = [torch.randn(1, n, config.text_dim, generator=generator).to(device, dtype) for n in (24, 12)]
        image = config.in_channels - vae.z_dim
        concat = torch.randn(1, image, *shape[2:], generator=generator).to(device) if image else None
        self.conditioning = Conditioning(cond=rows[0], uncond=rows[1], concat=concat)

    def run(self, plan: Plan) -> None:
        report = Report(self.device)
        batched = choose_batched("auto", plan, self.tokens, False)[0]
        acquire, given = self.experts.__getitem__, (self.conditioning, self.noise, self.vae, report)
        self.latents = sample_latents(plan, acquire, *given, batched=batched, ranks=self.ranks)
        self.peak = max(phase.peak for phase in report.phases.values())


def euler(steps: int) -> Plan:
    """Guided in every step, half of the steps by each expert."""
    plan = make_plan(steps=steps, solver="euler")
    if steps == 1:
        return plan
    first, last = plan.steps[steps // 2], plan.steps[steps // 2 - 1]
    return make_plan(steps=steps, solver="euler", boundary=(first.timestep + last.timestep) / 2000)


def warm_steps(time: int, steps: int) -> int:
    """The fewest steps that run both experts and that `time` ranks can share out."""
    return next(n for n in range(min(WARM_STEPS, steps), steps + 1) if time == 1 or shares_out(time, n))


def shares_out(time: int, steps: int) -> bool:
    try:
        Stretches.of(time, steps)
    except OptionError:
        return False
    return True


def whole_meshes(count: int, heads: int) -> list[Mesh]:
    """Of `count` GPUs: guidance, Ulysses, parallel steps (alone and with guidance), and the layer pipeline last."""
    meshes = [Mesh(cfg=2, ulysses=count // 2)] if count % 2 == 0 else []
    meshes += [Mesh(ulysses=count)] if count <= heads else []
    meshes += [Mesh(time=count)]
    meshes += [Mesh(time=count // 2, cfg=2)] if count % 2 == 0 and count // 2 in BEGINNINGS else []
    return [*meshes, Mesh(layers=count)]


def latent_shape(size: str, vae: VAEConfig) -> tuple[int, int, int, int, int]:
    """[1, C, T, Y, X] of a video of WIDTHxHEIGHTxFRAMES. Raises OptionError."""
    width, height, frames = parse_size(size)
    stride = vae.spatial_stride
    check_size(width, height, frames, multiple=2 * stride, temporal=vae.temporal_stride)
    return 1, vae.z_dim, (frames - 1) // vae.temporal_stride + 1, height // stride, width // stride
