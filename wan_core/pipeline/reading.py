"""Reading the models of a run: for a GPU all files at once, because reading, converting and copying use different
hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import Event

import torch
from torch import nn

from wan_core.checkpoint.staged import USUAL, Reading, default_threads
from wan_core.config import UserError

Load = Callable[[str, Reading], nn.Module]
WAKES = 0.1  # seconds after which one that waits for its turn looks whether loading has ended


class LoadingEnded(UserError):
    """Another model failed to load, or the user interrupted: this one is not needed any more."""


def load_parts(
    names: Sequence[str], load: Load, device: torch.device, *, in_order: bool, how: Reading = USUAL
) -> dict[str, nn.Module]:
    """What `load` returns for each of `names`, called with `how` files are read in its thread.

    For a GPU all are loaded at once, on a CPU one after the other. in_order: ranks that exchange what they read must
    all do so in the same order: all models are opened and read ahead at once, and take turns to exchange. A failure or
    an interruption ends the others within a tensor.
    """
    if in_order:
        return _in_order(names, load, device, how)
    if device.type == "cuda":
        # Weights that move to pinned memory are read: the pages of a mapping would count beside the copy.
        with _threads(len(names), load, device, replace(how, mapped=False)) as submit:
            return _results({name: submit(name) for name in names})
    return {name: load(name, how) for name in names}


def _in_order(names: Sequence[str], load: Load, device: torch.device, how: Reading) -> dict[str, nn.Module]:
    """One rank alone reads the text encoder: it waits for no turn."""
    free = Event()
    free.set()
    ends = {name: Event() for name in names if name != "text_encoder"}
    before = {"text_encoder": free} | dict(zip(ends, [free, *ends.values()], strict=False))

    def load_and_end(name: str, how: Reading) -> nn.Module:
        loaded = load(name, how)
        if name in ends:
            ends[name].set()
        return loaded

    with _threads(len(names), load_and_end, device, how, before) as submit:
        return _results({name: submit(name) for name in names})


def _results(futures: dict[str, Future[nn.Module]]) -> dict[str, nn.Module]:
    done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()  # raises what the first that failed did
    return {name: future.result() for name, future in futures.items()}


@contextmanager
def _threads(
    count: int, load: Load, device: torch.device, now: Reading, before: Mapping[str, Event] | None = None
) -> Iterator[Callable[[str], Future[nn.Module]]]:
    """Yields a function that loads a part in one of `count` threads. An exception inside ends all of them. now: how the
    caller reads. before: events after which it is a part's turn."""
    ended = Event()

    def on_bytes(read: int) -> None:
        if ended.is_set():
            raise LoadingEnded("loading has ended")
        if now.on_bytes is not None:
            now.on_bytes(read)

    def wait_for(turn: Event) -> None:
        while not turn.wait(WAKES):
            if ended.is_set():
                raise LoadingEnded("loading has ended")

    threads = now.threads
    if before is None:
        threads = threads or default_threads()
        threads = max(1, threads // 2) if count > 1 else threads  # two experts are nearly all of it
    how = replace(now, on_bytes=on_bytes, threads=threads)

    def within(name: str) -> nn.Module:
        mine = how if before is None else replace(how, turn=partial(wait_for, before[name]))
        # A new thread's current device is the first GPU, whatever its creator's is.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return load(name, mine)

    with ThreadPoolExecutor(count) as pool:
        try:
            yield lambda name: pool.submit(within, name)
        except BaseException:
            ended.set()
            raise
