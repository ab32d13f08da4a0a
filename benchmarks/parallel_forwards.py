"""Forwards of suite `parallel`: on one GPU, on every mesh, and diffusers' context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.always_sparse import AlwaysSparse
from benchmarks.cases import Case, make_case, plain_model
from benchmarks.exchanges import exchanges
from benchmarks.measure import make_room, measure, relative_error
from benchmarks.peers import PEERS
from benchmarks.rows import Row, guarded
from benchmarks.setups import Setup, find_setup
from wan_core.execution.report import GIB
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import BACKENDS
from wan_core.parallel.conditioning import ORDER, SplitBranches
from wan_core.parallel.costs import all_meshes
from wan_core.parallel.mesh import Mesh, RankMesh

TIMEOUT = timedelta(minutes=9)  # the other ranks wait while one writes two experts


class Ranks:
    """This rank among all of them. given: the options of the suite, as its first process sent them."""

    def __init__(self, world: RankMesh, given: dict[str, Any]) -> None:
        self.world, self.device, self.given = world, world.device, given
        self.count, self.sizes, self.runs = world.mesh.size, given["sizes"], given["runs"]
        self.dtype = torch.bfloat16 if given["cuda"] and given["dtype"] == "bf16" else torch.float32
        self.meshes = {str(world.mesh): world}

    @property
    def first(self) -> bool:
        return self.world.rank == 0

    def on(self, mesh: Mesh) -> RankMesh:
        """The groups of a mesh of all ranks, made once."""
        key = str(mesh)
        if key not in self.meshes:
            self.meshes[key] = RankMesh.create(mesh, self.device, timeout=TIMEOUT)
        return self.meshes[key]

    def wait(self) -> None:
        dist.barrier(group=self.world.control)

    def plain(self, setup: Setup | None = None) -> tuple[WanModel, int]:
        """The model of `plain_model`, quantised as `setup` says."""
        held = None if setup is None else setup.quantization(self.device)
        return plain_model(self.given["name"], self.device, self.dtype, self.given["layers"], held)


class Forwards:
    """Every method that yields or measures runs on each rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.single: dict[tuple[str, str], float] = {}  # (setup, size) -> seconds on one GPU
        self.diffusers: dict[str, float] = {}  # size -> seconds of its fastest row

    def rows(self) -> Iterator[Row]:
        for setup in map(find_setup, self.ranks.given["setups"]):
            reason = setup.why_not(self.ranks.device, self.ranks.dtype)
            if reason is not None:
                yield from (
                    guarded(f"{setup.name}, {self.ranks.count} GPUs", size, reason, dict) for size in self.ranks.sizes
                )
                continue
            model, stride = self.ranks.plain(setup)
            for case in [make_case(model, size, stride) for size in self.ranks.sizes]:
                exact = yield from self._alone(setup, case)
                for mesh in self._meshes(model.config, case.tokens, setup):
                    yield self._sharded(setup, case, mesh, exact)
                    if mesh.ring > 2:
                        yield self._sharded(setup, case, replace(mesh, both_ways=True), exact)
            AlwaysSparse.remove(model)  # ranks keep what exchanges tokens, and it would keep its attention
            del model, case, exact
            make_room(self.ranks.device)

    def _meshes(self, config: DiTConfig, tokens: int, setup: Setup) -> list[Mesh]:
        return all_meshes(self.ranks.count, config, tokens, BACKENDS[setup.attention].gives_lse)

    def _alone(self, setup: Setup, case: Case) -> Iterator[Any]:
        """The row of one GPU; gives its output, on the first rank only."""
        found: dict[str, Tensor] = {}

        def run() -> Row:
            measured = measure(lambda: forward(case), self.ranks.device, self.ranks.runs)
            found["output"] = measured.output
            self.single[setup.name, case.size] = measured.median
            return {"tokens": case.tokens, "gpus": 1, **measured.numbers()}

        setup.apply(case.model)
        row = guarded(f"{setup.name}, 1 GPU", case.size, None, run) if self.ranks.first else {}
        self.ranks.wait()
        yield row
        return found.get("output")

    def _sharded(self, setup: Setup, case: Case, mesh: Mesh, exact: Tensor | None) -> Row:
        ranks, counts = self.ranks.on(mesh), {"bytes": 0}
        name = f"{setup.name}, {mesh.describe().partition(': ')[2]}"

        def prepare() -> Callable[[], Tensor]:
            if mesh.cfg == 1:
                return forward(case)
            texts = dict(zip(ORDER, map(case.model.prepare_text, case.contexts), strict=True))
            split, shape = SplitBranches(ranks), (1, case.model.config.out_channels, *case.x.shape[2:])
            one = lambda branch: case.model(case.x, case.timestep, texts[branch])  # noqa: E731
            return lambda: split(ORDER, one, shape)["cond"]

        def run() -> Row:
            setup.apply(case.model, ranks=ranks)
            with setup.running():
                with exchanges(counts):
                    measured = measure(prepare, self.ranks.device, self.ranks.runs)
                with exchanges(None):
                    without = measure(prepare, self.ranks.device, 1)
            seconds = measured.median / mesh.cfg
            row: Row = {"tokens": case.tokens, "gpus": self.ranks.count, "mesh": str(mesh), **measured.numbers()}
            row |= {"seconds": round(seconds, 5), "moved_gib": round(counts["bytes"] / (self.ranks.runs + 1) / GIB, 3)}
            row["exchange_share"] = round(max(0.0, 1 - without.median / measured.median), 4)
            if exact is not None:
                row["error"] = relative_error(measured.output, exact)
            if (setup.name, case.size) in self.single:
                row["ratio"] = round(self.single[setup.name, case.size] / seconds, 4)
                row["ratio_to"] = f"{setup.name}, 1 GPU"
            if case.size in self.diffusers:
                row["times_diffusers"] = round(self.diffusers[case.size] / seconds, 4)
            return row

        return guarded(name, case.size, None, run)

    def diffusers_rows(self) -> Iterator[Row]:
        """diffusers' Ulysses and ring over all ranks."""
        peer = PEERS["diffusers"]
        reason = "its context parallelism needs GPUs" if self.ranks.device.type != "cuda" else peer.why_not()
        model, stride = self.ranks.plain() if reason is None else (None, 0)
        cases = [] if model is None else [make_case(model, size, stride) for size in self.ranks.sizes]
        for kind in ("ulysses", "ring"):
            for size in self.ranks.sizes:
                name = f"diffusers, {kind} {self.ranks.count}"

                def run(kind: str = kind, size: str = size) -> Row:
                    from diffusers import ContextParallelConfig  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

                    case = cases[self.ranks.sizes.index(size)]
                    built, call = peer.ready(case.model)
                    degree: Any = {f"{kind}_degree": self.ranks.count}
                    built.enable_parallelism(config=ContextParallelConfig(**degree))  # pyright: ignore[reportCallIssue]
                    torch._dynamo.reset()
                    built.compile_repeated_blocks()  # pyright: ignore[reportCallIssue]
                    ready = lambda: lambda: call(case.x, case.timestep, case.contexts[0])  # noqa: E731
                    measured = measure(ready, self.ranks.device, self.ranks.runs)
                    self.diffusers[size] = min(self.diffusers.get(size, float("inf")), measured.median)
                    return {"tokens": case.tokens, "gpus": self.ranks.count, **measured.numbers()}

                yield guarded(name, size, reason, run)
                make_room(self.ranks.device)


def forward(case: Case) -> Callable[[], Tensor]:
    text = case.model.prepare_text(case.contexts[0])
    return lambda: case.model(case.x, case.timestep, text)
