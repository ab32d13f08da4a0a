"""`generate --gpus`: starts the same worker processes as ComfyUI's launcher node."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from wan_core.config import OptionError

if TYPE_CHECKING:
    from wan_core.pipeline.engine import Engine
    from wan_core.workers.options import WorkerOptions


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several GPUs (docs/parallel.md)")
    group.add_argument("--gpus", metavar="N|LIST", help="number of GPUs, a list (0,1), or auto for all; cpu,cpu")
    group.add_argument(
        "--mesh",
        default="auto",
        help="GUIDANCExRINGxULYSSES, for example 2x1x2; layersN, timeN[+MESH] (docs/parallel.md; default %(default)s)",
    )
    group.add_argument(
        "--step-timeout", type=float, default=600.0, metavar="SECONDS", help="stop after so long without progress"
    )
    group.add_argument("--nnodes", type=int, default=1, metavar="HOSTS", help="number of hosts")
    group.add_argument("--rdzv", metavar="HOST:PORT", help="address where the hosts meet: a free port of one of them")
    group.add_argument("--rdzv-id", default="wancore", help="name of the run on all hosts (default %(default)s)")


def worker_options(options: argparse.Namespace) -> WorkerOptions | None:
    """None without --gpus. Raises OptionError."""
    if options.gpus is None:
        if options.mesh != "auto" or options.nnodes != 1 or options.rdzv is not None:
            raise OptionError("--mesh, --nnodes and --rdzv are for several GPUs: give --gpus as well")
        return None
    from wan_core.workers.options import WorkerOptions

    return WorkerOptions(
        devices=devices_of(options),
        mesh=options.mesh.strip().lower(),
        step_timeout=options.step_timeout,
        nodes=options.nnodes,
        rendezvous=options.rdzv,
        run_id=None if options.rdzv is None else options.rdzv_id,
    )


def devices_of(options: argparse.Namespace) -> tuple[str, ...]:
    """What --gpus names. Raises OptionError."""
    import torch

    from wan_core.workers.options import parse_devices

    if options.device != "auto":
        raise OptionError("--gpus chooses the devices: leave out --device")
    return parse_devices(options.gpus, torch.cuda.device_count())


def engine_of(options: argparse.Namespace) -> Engine:
    """This process, or the workers that --gpus names. Raises OptionError."""
    workers = worker_options(options)
    if workers is None:
        from wan_core.pipeline.engine import LocalEngine

        return LocalEngine()
    from wan_core.workers.client import WorkerEngine
    from wan_core.workers.launcher import Workers

    return WorkerEngine(Workers(workers))
