"""What tests ask of the pair of worker processes that `conftest.py` starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tools.processes import below
from wan_core.config import (
    LoadOptions,
    Request,
)
from wan_core.pipeline.pipeline import Result
from wan_core.pipeline.run import Watch
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import Workers

TINY = LoadOptions(model="tiny", device="cpu")
SMALL = {"prompt": "a red circle moving right on a blue background", "width": 48, "height": 48, "frames": 5, "seed": 3}
LEAST = {**SMALL, "width": 32, "height": 32, "steps": 1}
LONG = {**SMALL, "steps": 1000, "solver": "euler", "width": 96, "height": 96, "frames": 17}  # half a minute at least
MESH = "1x1x2"  # every forward needs both ranks
TIMEOUTS: dict[str, Any] = {"start_timeout": 120.0, "step_timeout": 120.0, "heartbeat_timeout": 60.0}


def run(workers: Workers, **changed: Any) -> Result:
    keep = changed.pop("keep_latents", None)
    on_step: Callable[..., None] | None = changed.pop("on_step", None)
    return WorkerEngine(workers).generate(TINY, Request(**{**SMALL, **changed}), Watch(step=on_step, keep_latents=keep))


def ranks(workers: Workers) -> list[int]:
    """Process ids by rank. Starts the workers if none run."""
    if not workers.is_running:
        run(workers)
    pids = sorted(all_of(workers) - {supervisor_of(workers)})
    assert len(pids) == 2
    return pids


def supervisor_of(workers: Workers) -> int:
    assert workers._processes is not None
    return workers._processes.process.pid


def all_of(workers: Workers) -> set[int]:
    """Process ids of ranks and supervisor."""
    return below(supervisor_of(workers)) | {supervisor_of(workers)}


@contextlib.contextmanager
def short_timeouts(workers: Workers, **limits: float) -> Iterator[None]:
    """With other timeouts."""
    original = workers.options
    workers.options = replace(original, **limits)  # pyright: ignore[reportArgumentType]
    yield
    workers.options = original
