"""All models of a run, read at once where that helps, and what is set up meanwhile.

Reading one, converting another and setting up a third use different hardware. What a run needs beside its weights takes
seconds as well: importing the attention's library and the compiler, and the first step (`rehearsal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Event

import torch
from torch import nn

from wan_core.attention.registry import AttendLse
from wan_core.checkpoint.staged import SHARED_THREADS, current_reading, reading
from wan_core.config import UserError
from wan_core.rehearsal import Rehearsal, quick_turns

Load = Callable[[str], nn.Module]


@dataclass(frozen=True)
class Prepared:
    """What is made beside the reading: the name of the attention backend, what rehearses with it, and what a ring needs
    of it."""

    attention: str
    rehearsal: Rehearsal
    attend_lse: AttendLse | None = None


class LoadingEnded(UserError):
    """Another model could not be loaded, or whoever waited was interrupted: the rest is not wanted."""


def load_parts(
    names: Sequence[str], load: Load, device: torch.device, *, in_order: bool, prepare: Callable[[], Prepared]
) -> tuple[dict[str, nn.Module], Prepared]:
    """What `load` gives for each of `names`, and what `prepare` gives.

    For a GPU all are loaded at once, and `prepare` and the rehearsal that it makes run in this thread meanwhile. On a
    CPU, too, where there is something to rehearse; else one after the other. in_order: ranks that exchange what they
    read must all read alike, so only the text encoder, which one of them reads alone, is read beside the others.

    What fails or interrupts one ends the others within a tensor.
    """
    if device.type == "cuda" and not in_order:
        return _beside(names, load, device, prepare)
    prepared = prepare()
    if in_order:
        if prepared.rehearsal.worthwhile:
            prepared.rehearsal.run()
        return _in_order(names, load, device), prepared
    if prepared.rehearsal.worthwhile:
        return _beside(names, load, device, lambda: prepared)
    return {name: load(name) for name in names}, prepared


def _beside(
    names: Sequence[str], load: Load, device: torch.device, prepare: Callable[[], Prepared]
) -> tuple[dict[str, nn.Module], Prepared]:
    with _threads(len(names), load, device, mapped=device.type != "cuda") as begin:
        futures = [begin(name) for name in names]
        with quick_turns:
            prepared = prepare()
        if prepared.rehearsal.worthwhile:
            prepared.rehearsal.run(wanted=lambda: not any(map(_failed, futures)))
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()  # raises what the first that failed did
        return {name: future.result() for name, future in zip(names, futures, strict=True)}, prepared


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

    threads = min(now.threads, SHARED_THREADS) if count > 1 else now.threads
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
