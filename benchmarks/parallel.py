"""Suite `parallel`: one transformer on several GPUs, on every mesh, beside diffusers' context parallelism.

    python -m wan_core bench --suite parallel --gpus 4 --out benchmarks/results

It starts a rank for each GPU; they hold the same random weights and measure one row after the other together. Rows:

diffusers, ulysses N / ring N   `ContextParallelConfig`, blocks compiled, bf16
SETUP, 1 GPU                    what `ratio` refers to, on the first GPU while the others wait
SETUP, ulysses N, ring N, ...   one forward on that mesh
SETUP, guidance 2 x ...         both branches at once, divided by two
decode, encode                  the 2.1 VAE in bf16, on one GPU and in strips
load both experts               bf16 from files in the page cache, read by threads: whole by one GPU, a part by each

seconds, spread   as everywhere; of the first rank, which waits for the others in every exchange
moved_gib         what the first rank sends in one forward
exchange_share    1 - seconds without exchanges / seconds: the same forward with every exchange left out, its results
                  garbage
times_diffusers   seconds of the fastest diffusers row of that size over ours
error             relative difference from the same setup's forward on one GPU
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.cases import Case, make_case, parse_size, plain_model
from benchmarks.measure import make_room, measure, relative_error
from benchmarks.peers import PEERS
from benchmarks.rows import Row, guarded
from benchmarks.setups import Setup, find_setup
from wan_core.checkpoint import load_dit, load_vae, open_checkpoint
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import save
from wan_core.config import OptionError
from wan_core.execution.optimize import optimize_vae
from wan_core.execution.report import GIB
from wan_core.models.vae.config import VAE_21
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.config import DiTConfig
from wan_core.parallel import guidance, ring, sequence, ulysses
from wan_core.parallel import mesh as mesh_module
from wan_core.parallel.costs import all_meshes
from wan_core.parallel.guidance import SplitBranches
from wan_core.parallel.mesh import Mesh, RankMesh
from wan_core.parallel.sequence import find_lse
from wan_core.parallel.weights import shared_checkpoint
from wan_core.pipeline.builder import TINY
from wan_core.sampling.sparsity.run import AlwaysSparse

DEFAULT_SETUPS = ("fp8 + cudnn-fp8", "+ flash4")
CPU_SETUPS = ("plain/sdpa/torch",)
TIMEOUT = timedelta(minutes=9)  # writing two experts takes the other ranks' patience
SILENCE = 560.0  # seconds without a row


def parallel_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Start a rank for each GPU and hand on the rows of the first. Raises OptionError for GPUs that are not there."""
    cuda = device.type == "cuda"
    count = options.gpus or (torch.cuda.device_count() if cuda else 2)
    if count < 2 or (cuda and count > torch.cuda.device_count()):
        there = f"{torch.cuda.device_count()} are there" if cuda else "a CPU takes any number of ranks"
        raise OptionError(f"{count} GPUs given to the suite parallel; it needs 2 or more, and {there}")
    details |= {"gpus": count, "layers": options.layers or "all"}
    setups = options.setup or (DEFAULT_SETUPS if cuda else CPU_SETUPS)
    given = {
        "name": name, "sizes": sizes, "setups": list(setups), "layers": options.layers, "runs": options.runs or 2,
        "cuda": cuda, "dtype": options.precision, "only": options.setting or [],
    }  # fmt: skip
    context = mp.get_context("spawn")
    rows: Any = context.Queue()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = [context.Process(target=_rank, args=(r, count, port, given, rows), daemon=True) for r in range(count)]
    for process in processes:
        process.start()
    try:
        while (row := _next(rows, processes)) is not None:
            yield row
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _next(rows: Any, processes: list[Any]) -> Row | None:
    """The next row; one that says what failed, once, if a rank is gone; None after the last."""
    waited = 0.0
    while waited < SILENCE:
        try:
            return rows.get(timeout=2)
        except queue.Empty:
            waited += 2
            dead = [i for i, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(f"ranks {dead} of the suite parallel ended: see their output above") from None
    raise RuntimeError(f"no row for {SILENCE:g} seconds")


def _rank(rank: int, count: int, port: int, given: dict[str, Any], rows: Any) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    os.environ.update({key: str(value) for key, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast needs a service that not every host runs
    device = torch.device("cuda", rank) if given["cuda"] else torch.device("cpu")
    if not given["cuda"]:
        torch.set_num_threads(1)
    ranks = RankMesh.start(Mesh(1, 1, count), device, timeout=TIMEOUT)
    for row in Together(ranks, given).rows():
        if rank == 0:
            rows.put(row)
    if rank == 0:
        rows.put(None)
    dist.barrier()
    dist.destroy_process_group()


class Together:
    """What all ranks do, in step: every method that yields or measures runs on each of them."""

    def __init__(self, world: RankMesh, given: dict[str, Any]) -> None:
        self.world, self.device, self.given = world, world.device, given
        self.count, self.sizes, self.runs = world.mesh.size, given["sizes"], given["runs"]
        self.dtype = torch.bfloat16 if given["cuda"] and given["dtype"] == "bf16" else torch.float32
        self.meshes = {str(world.mesh): world}
        self.single: dict[tuple[str, str], float] = {}
        self.diffusers: dict[str, float] = {}

    def rows(self) -> Iterator[Row]:
        """Settings, if any are named, choose among "diffusers", "forward", "vae" and "load"."""
        parts = {"diffusers": self.peers, "forward": self.forwards, "vae": self.pictures, "load": self.loads}
        for name, part in parts.items():
            if not self.given["only"] or name in self.given["only"]:
                yield from part()
                make_room(self.device)

    def on(self, mesh: Mesh) -> RankMesh:
        """The groups of a mesh of all ranks, made once."""
        key = str(mesh)
        if key not in self.meshes:
            self.meshes[key] = RankMesh.create(mesh, self.device, timeout=TIMEOUT)
        return self.meshes[key]

    def wait(self) -> None:
        dist.barrier(group=self.world.control)

    def plain(self, setup: Setup | None = None) -> tuple[Any, int]:
        held = None if setup is None else setup.quantization(self.device)
        return plain_model(self.given["name"], self.device, self.dtype, self.given["layers"], held)

    # ------------------------------------------------------------------------------------------------------ forwards

    def forwards(self) -> Iterator[Row]:
        for setup in map(find_setup, self.given["setups"]):
            reason = setup.why_not(self.device, self.dtype)
            if reason is not None:
                yield from (guarded(f"{setup.name}, {self.count} GPUs", size, reason, dict) for size in self.sizes)
                continue
            model, stride = self.plain(setup)
            for case in [make_case(model, size, stride) for size in self.sizes]:
                exact = yield from self._alone(setup, case)
                for mesh in self._meshes(model.config, case.tokens, setup):
                    yield self._sharded(setup, case, mesh, exact)
                    if mesh.ring > 2:
                        yield self._sharded(setup, case, replace(mesh, both_ways=True), exact)
            AlwaysSparse.remove(model)  # ranks keep what exchanges tokens, and it would keep its attention
            del model, case, exact
            make_room(self.device)

    def _meshes(self, config: DiTConfig, tokens: int, setup: Setup) -> list[Mesh]:
        rings = find_lse_or_none(setup.attention) is not None
        return all_meshes(self.count, config, tokens, rings)

    def _alone(self, setup: Setup, case: Case) -> Iterator[Any]:
        """The row of one GPU; gives its output, on the first rank only."""
        found: dict[str, Tensor] = {}

        def run() -> Row:
            measured = measure(lambda: forward(case), self.device, self.runs)
            found["output"] = measured.output
            self.single[setup.name, case.size] = measured.median
            return {"tokens": case.tokens, "gpus": 1, **measured.numbers()}

        setup.apply(case.model)
        row = guarded(f"{setup.name}, 1 GPU", case.size, None, run) if self.world.rank == 0 else {}
        self.wait()
        yield row
        return found.get("output")

    def _sharded(self, setup: Setup, case: Case, mesh: Mesh, exact: Tensor | None) -> Row:
        ranks, counts = self.on(mesh), {"bytes": 0}
        name = f"{setup.name}, {mesh.describe().partition(': ')[2]}"

        def prepare() -> Callable[[], Tensor]:
            if mesh.cfg == 1:
                return forward(case)
            texts = dict(zip(guidance.ORDER, map(case.model.prepare_text, case.contexts), strict=True))
            split, shape = SplitBranches(ranks), (1, case.model.config.out_channels, *case.x.shape[2:])
            one = lambda branch: case.model(case.x, case.timestep, texts[branch])  # noqa: E731
            return lambda: split.run(guidance.ORDER, one, shape)["cond"]

        def run() -> Row:
            setup.apply(case.model, ranks=ranks, attend_lse=find_lse(setup.attention, mesh))
            with setup.running():
                with exchanges(counts):
                    measured = measure(prepare, self.device, self.runs)
                with exchanges(None):
                    without = measure(prepare, self.device, 1)
            seconds = measured.median / mesh.cfg
            row: Row = {"tokens": case.tokens, "gpus": self.count, "mesh": str(mesh), **measured.numbers()}
            row |= {"seconds": round(seconds, 5), "moved_gib": round(counts["bytes"] / (self.runs + 1) / GIB, 3)}
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

    # ----------------------------------------------------------------------------------------------------- diffusers

    def peers(self) -> Iterator[Row]:
        """diffusers' Ulysses and ring over all ranks."""
        peer = PEERS["diffusers"]
        reason = "its context parallelism needs GPUs" if self.device.type != "cuda" else peer.why_not()
        model, stride = self.plain() if reason is None else (None, 0)
        cases = [] if model is None else [make_case(model, size, stride) for size in self.sizes]
        for kind in ("ulysses", "ring"):
            for size in self.sizes:
                name = f"diffusers, {kind} {self.count}"

                def run(kind: str = kind, size: str = size) -> Row:
                    from diffusers import ContextParallelConfig  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

                    case = cases[self.sizes.index(size)]
                    built, call = peer.ready(case.model)
                    degree: Any = {f"{kind}_degree": self.count}
                    built.enable_parallelism(config=ContextParallelConfig(**degree))  # pyright: ignore[reportCallIssue]
                    torch._dynamo.reset()
                    built.compile_repeated_blocks()  # pyright: ignore[reportCallIssue]
                    ready = lambda: lambda: call(case.x, case.timestep, case.contexts[0])  # noqa: E731
                    measured = measure(ready, self.device, self.runs)
                    self.diffusers[size] = min(self.diffusers.get(size, float("inf")), measured.median)
                    return {"tokens": case.tokens, "gpus": self.count, **measured.numbers()}

                yield guarded(name, size, reason, run)
                make_room(self.device)

    # -------------------------------------------------------------------------------------------- pictures and files

    def pictures(self) -> Iterator[Row]:
        if self.device.type == "cuda":
            vae = random_module(VAE_21, device=self.device, dtype=self.dtype)
        else:
            vae = load_vae(TINY / "vae.safetensors", dtype=self.dtype)
        assert isinstance(vae, VideoVAE)
        for size in self.sizes:
            width, height, frames = parse_size(size)
            stride = vae.config.spatial_stride
            shape = (1, vae.config.z_dim, (frames - 1) // 4 + 1, height // stride, width // stride)
            latents = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device)
            video = torch.rand(1, 3, frames, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1
            video = video.to(self.device, vae.conv2.weight.dtype)
            for name, run in {
                "decode": lambda n, x=latents: vae.decode(x, chunk=n),
                "encode": lambda n, x=video: vae.encode(x, chunk=n),
            }.items():
                optimize_vae(vae, self.device)
                vae.strips = None
                row, output = {}, None
                if self.world.rank == 0:
                    row, output = self._timed(f"{name}, 1 GPU", size, lambda r=run: r(1))
                self.wait()
                yield row
                optimize_vae(vae, self.device, self.world)
                shared, found = self._timed(f"{name}, strips {self.count}", size, lambda r=run: r(vae.strips.chunk))
                if output is not None and found is not None:
                    shared["error"] = relative_error(found, output)
                    shared |= {"ratio": round(row["seconds"] / shared["seconds"], 4), "ratio_to": row["name"]}
                yield shared

    def _timed(self, name: str, size: str, run: Callable[[], Tensor]) -> tuple[Row, Tensor | None]:
        found: list[Tensor] = []

        def make() -> Row:
            measured = measure(lambda: run, self.device, self.runs)
            found.append(measured.output.cpu())
            return measured.numbers()

        return guarded(name, size, None, make), found[0] if found else None

    def loads(self) -> Iterator[Row]:
        """Both experts from their file, which is in the page cache: it was written a moment ago, and is read twice."""
        folder = Path(tempfile.gettempdir()) / f"wancore-bench-{os.environ['MASTER_PORT']}"
        path, size = folder / "expert.safetensors", self.sizes[0]
        if self.world.rank == 0:
            folder.mkdir(exist_ok=True)
            save(self.plain()[0], path)
            make_room(self.device)
        self.wait()
        try:
            seconds: dict[str, float] = {}
            for name, share in (("1 GPU", None), (f"shared by {self.count} GPUs", self.world)):
                row = {}
                if share is not None or self.world.rank == 0:
                    row = guarded(f"load both experts, {name}", size, None, lambda s=share: self._load(path, s))
                self.wait()
                if "seconds" in row and seconds:
                    row |= {"ratio": round(seconds["one"] / row["seconds"], 4), "ratio_to": "load both experts, 1 GPU"}
                seconds.setdefault("one", row.get("seconds", float("nan")))
                yield row
                make_room(self.device)
        finally:
            self.wait()
            if self.world.rank == 0:
                path.unlink(missing_ok=True)
                folder.rmdir()

    def _load(self, path: Path, share: RankMesh | None) -> Row:
        def both() -> Tensor:
            loaded = []
            for _ in range(2):
                checkpoint = open_checkpoint(path)
                checkpoint = checkpoint if share is None else shared_checkpoint(checkpoint, share)
                loaded.append(load_dit(checkpoint, device=self.device, dtype=self.dtype))
            return loaded[0].patch_embedding.weight[:1].clone()

        measured = measure(lambda: both, self.device, min(self.runs, 3))
        return {**measured.numbers(), "file_gib": round(path.stat().st_size / GIB, 2)}


def forward(case: Case) -> Callable[[], Tensor]:
    text = case.model.prepare_text(case.contexts[0])
    return lambda: case.model(case.x, case.timestep, text)


def find_lse_or_none(attention: str) -> Any:
    try:
        return find_lse(attention, Mesh(1, 2, 1))
    except OptionError:
        return None


@contextmanager
def exchanges(counts: dict[str, int] | None) -> Iterator[None]:
    """Inside, exchanges of a forward add what this rank sends to `counts["bytes"]`; None: they are left out."""

    def watched(owner: Any, name: str, sent: Callable[..., int], nothing: Any = None) -> Any:
        plain = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            if counts is None:
                return nothing
            counts["bytes"] += sent(*given)
            return plain(*given, **named)

        return mock.patch.object(owner, name, call)

    def own(x: Tensor, group: Any) -> int:
        return nbytes(x) * (group.size - 1)

    def leaving(into: Tensor, out: Tensor, _: Any, sizes: list[int], group: Any) -> int:
        return (out.numel() - sizes[group.index]) * out.element_size()

    with ExitStack() as stack:
        for patch in (
            watched(ulysses, "all_to_all", leaving),
            watched(ring, "pass_on", lambda sends, receives, group: sum(nbytes(x) for x, _ in sends), []),
            watched(mesh_module, "all_gather", lambda into, part, group: own(part, group)),
            watched(guidance, "all_gather", lambda into, part, group: own(part, group)),
            watched(sequence, "reduce", lambda x, how, group: own(x, group)),
        ):
            stack.enter_context(patch)
        yield


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
