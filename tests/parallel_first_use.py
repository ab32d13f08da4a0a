"""What ranks do in tests of the first use of kernels: as `parallel_checks`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from parallel_checks import CAPTION, ranks_of

from wan_core.config import LoadOptions, Request, SkipOptions, SparseOptions
from wan_core.ops.attention.sparse.forward import SparseForward
from wan_core.parallel import sequence
from wan_core.parallel.vae import Strip
from wan_core.pipeline import first_use, load
from wan_core.pipeline.decode import decode_latents
from wan_core.pipeline.pipeline import Pipeline

LASTS = 0.1  # seconds that preparing takes at least


class Watch:
    """When loading and preparing began and ended, and the shapes that attention gets while preparing and in a run."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.shapes: dict[bool, set[tuple[Any, ...]]] = {True: set(), False: set()}
        self.main = threading.current_thread()

    def timed(self, name: str, work: Callable[..., Any], lasts: float = 0.0) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self.begun[name] = time.monotonic()
            try:
                time.sleep(lasts)
                return work(*arguments, **named)
            finally:
                self.ended[name] = time.monotonic()

        return run

    def seen(self, name: str, work: Callable[..., Any], at: int) -> Callable[..., Any]:
        """`work`, noting the shape of its argument `at`, or of the first of several in that place."""

        def call(*arguments: Any) -> Any:
            x = arguments[at] if isinstance(arguments[at], torch.Tensor) else arguments[at][0]
            self.shapes[threading.current_thread() is not self.main].add((name, tuple(x.shape), x.dtype))
            return work(*arguments)

        return call


def first_use_of(
    mesh: str,
    folder: str,
    *,
    prepare: bool = True,
    fails: bool = False,
    decode: bool = False,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """A run of the embedded model on ranks that prepare kernels as on GPUs: its latents, its notes, and what `Watch`
    saw. fails: preparing raises in the middle."""
    skip = SkipOptions(sparse=SparseOptions(sparsity=0.5, ramp=0))
    request, watch = Request(prompt=CAPTION, steps=4, seed=3, width=80, height=80, frames=5, skip=skip), Watch()
    forwards = first_use.forward_each_kind

    def work(*arguments: Any, **named: Any) -> None:
        forwards(*arguments, **named)
        if fails:
            raise RuntimeError("this card is too old")

    changed = [
        mock.patch.object(first_use, "prepares", return_value=prepare),
        mock.patch.object(first_use, "forward_each_kind", watch.timed("prepare", work, LASTS)),
        mock.patch.object(load, "load_parts", watch.timed("load", load.load_parts)),
        mock.patch.object(sequence, "heads_for_tokens", watch.seen("dense", sequence.heads_for_tokens, 0)),
        mock.patch.object(Strip, "widen", watch.seen("vae", Strip.widen, 1)),
        mock.patch.object(SparseForward, "route", watch.seen("sparse", SparseForward.route, 3)),
        mock.patch.dict("os.environ", {"WANCORE_CACHE": folder}),
    ]
    with ExitStack() as stack:
        for change in changed:
            stack.enter_context(change)
        load_options = LoadOptions(**{"model": "tiny", "device": device, **options})
        pipe = Pipeline.load(load_options, request=request, ranks=ranks_of(mesh, device))
        run = pipe.prepare(request)
        conditioning = pipe.encode(run)
        pipe.models.wait_for_kernels(pipe.report)
        watch.begun["sample"] = time.monotonic()
        latents = pipe.sample(run, conditioning)
        if decode:
            decode_latents(pipe.models.vae(), latents, pipe.report)
    return {"latents": latents, "notes": pipe.report.notes, **vars(watch), "main": None}
