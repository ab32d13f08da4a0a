"""Suite `parallel`: one transformer on several GPUs, on every mesh, beside diffusers' context parallelism.

    python -m benchmarks parallel --gpus 4 --out benchmarks/results

It starts a rank for each GPU; they hold the same random weights and measure one row after the other together. Rows:

diffusers, ulysses N / ring N   `ContextParallelConfig`, blocks compiled, bf16
SETUP, 1 GPU                    what `ratio` refers to, on the first GPU while the others wait
SETUP, ulysses N, ring N, ...   one forward on that mesh
SETUP, guidance 2 x ...         both branches at once, divided by two

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
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.measure import make_room
from benchmarks.options import PARALLEL_PARTS
from benchmarks.parallel_forwards import TIMEOUT, Forwards, Ranks
from benchmarks.rows import Row
from wan_core.config import OptionError
from wan_core.parallel.mesh import Mesh, RankMesh

DEFAULT_SETUPS = ("fp8 + cudnn-fp8", "+ flash4")
CPU_SETUPS = ("plain/sdpa/torch",)
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
    details["environment"] = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
    setups = options.setup or (DEFAULT_SETUPS if cuda else CPU_SETUPS)
    given = {
        "name": name, "sizes": sizes, "setups": list(setups), "layers": options.layers, "runs": options.runs or 2,
        "cuda": cuda, "dtype": options.precision, "only": options.setting or list(PARALLEL_PARTS),
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
    ranks = Ranks(RankMesh.start(Mesh(1, 1, count), device, timeout=TIMEOUT), given)
    for row in all_rows(ranks):
        if rank == 0:
            rows.put(row)
    if rank == 0:
        rows.put(None)
    dist.barrier()
    dist.destroy_process_group()


def all_rows(ranks: Ranks) -> Iterator[Row]:
    """Every rank makes all of them, in step. Settings, if any are named, choose among the parts."""
    forwards = Forwards(ranks)
    parts = {
        "diffusers": forwards.diffusers_rows,
        "forward": forwards.rows,
    }
    for name, part in parts.items():
        if name in ranks.given["only"]:
            yield from part()
            make_room(ranks.device)
