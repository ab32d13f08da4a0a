"""All models of a run, read at once where that helps, and the first step that is set up meanwhile.

Reading one, converting another and setting up a third use different hardware. Importing libraries is not among what
goes on meanwhile: it is nothing but Python, and whoever reads needs Python for an instant between two pieces. Beside
each other, importing took 11 s for 7 and reading 10 s for 1.6 (measured on an H200's host, 16 cores).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import Event

import torch
from torch import nn

from wan_core.checkpoint.staged import current_reading, default_threads, reading
from wan_core.config import UserError
from wan_core.pipeline.rehearsal import Rehearsal

Load = Callable[[str], nn.Module]


class LoadingEnded(UserError):
    """Another model could not be loaded, or whoever waited was interrupted: the rest is not wanted."""


def load_parts(
    names: Sequence[str], load: Load, device: torch.device, *, in_order: bool, rehearsal: Rehearsal | None = None
) -> dict[str, nn.Module]:
    """What `load` gives for each of `names`.

    The rehearsal begins before anything is read. For a GPU all are loaded at once, and it runs in this thread meanwhile
    where it has something to do beside. On a CPU, too, where it has; else one after the other. in_order: ranks that
    exchange what they read must all read alike, so only the text encoder, which one of them reads alone, is read beside
    the others.

    What fails or interrupts one ends the others within a tensor.
    """
    rehearsal = rehearsal if rehearsal is not None and rehearsal.worthwhile else None
    if rehearsal is not None:
        rehearsal.begin()
        rehearsal = rehearsal if rehearsal.beside else None
    if in_order:
        if rehearsal is not None:
            rehearsal.run()
        return _in_order(names, load, device)
    if device.type == "cuda" or rehearsal is not None:
        return _at_once(names, load, device, rehearsal)
    return {name: load(name) for name in names}


def _at_once(
    names: Sequence[str], load: Load, device: torch.device, rehearsal: Rehearsal | None
) -> dict[str, nn.Module]:
    with _threads(len(names), load, device, mapped=device.type != "cuda") as begin:
        futures = [begin(name) for name in names]
        if rehearsal is not None:
            rehearsal.run(wanted=lambda: not any(map(_failed, futures)))
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()  # raises what the first that failed did
        return {name: future.result() for name, future in zip(names, futures, strict=True)}


def _in_order(names: Sequence[str], load: Load, device: torch.device) -> dict[str, nn.Module]:
    with _threads(2, load, device, mapped=True) as begin:
        alone = begin("text_encoder") if "text_encoder" in names else None
        found = {name: load(name) for name in names if name != "text_encoder"}
        return found if alone is None else found | {"text_encoder": alone.result()}


@contextmanager
def _threads(
    count: int, load: Load, device: torch.device, *, mapped: bool
) -> Iterator[Callable[[str], Future[nn.Module]]]:
    """What loads a part in one of `count` threads. Whatever is raised inside ends them. mapped: files may be mapped
    where that was asked for; what moves to locked memory is read, as pages of a mapping would count beside the copy."""
    now, ended = current_reading(), Event()

    def on_bytes(read: int) -> None:
        if ended.is_set():
            raise LoadingEnded("loading has ended")
        if now.on_bytes is not None:
            now.on_bytes(read)

    threads = now.threads or default_threads()
    if count > 1:  # two experts are nearly all of it
        threads = max(1, threads // 2)
    how = replace(now, on_bytes=on_bytes, threads=threads, mapped=now.mapped and mapped)

    def within(name: str) -> nn.Module:
        # A thread's current device is the first one, whatever its maker's is.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), reading(how):
            return load(name)

    with ThreadPoolExecutor(count) as pool:
        try:
            yield lambda name: pool.submit(within, name)
        except BaseException:
            ended.set()
            raise


def _failed(future: Future[nn.Module]) -> bool:
    return future.done() and future.exception() is not None
