"""Reading the models of a run: for a GPU all files at once, because reading, converting and copying use different
hardware."""

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

Load = Callable[[str], nn.Module]


class LoadingEnded(UserError):
    """Another model failed to load, or the user interrupted: this one is not needed any more."""


def load_parts(names: Sequence[str], load: Load, device: torch.device, *, in_order: bool) -> dict[str, nn.Module]:
    """What `load` returns for each of `names`.

    For a GPU all are loaded at once, on a CPU one after the other. in_order: ranks that exchange what they read must
    all read in the same order; only the text encoder, which one rank reads alone, is read beside the others. A failure
    or an interruption ends the others within a tensor.
    """
    if in_order:
        return _in_order(names, load, device)
    if device.type == "cuda":
        return _at_once(names, load, device)
    return {name: load(name) for name in names}


def _at_once(names: Sequence[str], load: Load, device: torch.device) -> dict[str, nn.Module]:
    with _threads(len(names), load, device, mapped=False) as submit:
        futures = [submit(name) for name in names]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()  # raises what the first that failed did
        return {name: future.result() for name, future in zip(names, futures, strict=True)}


def _in_order(names: Sequence[str], load: Load, device: torch.device) -> dict[str, nn.Module]:
    with _threads(2, load, device, mapped=True) as submit:
        alone = submit("text_encoder") if "text_encoder" in names else None
        found = {name: load(name) for name in names if name != "text_encoder"}
        return found if alone is None else found | {"text_encoder": alone.result()}


@contextmanager
def _threads(
    count: int, load: Load, device: torch.device, *, mapped: bool
) -> Iterator[Callable[[str], Future[nn.Module]]]:
    """Yields a function that loads a part in one of `count` threads. An exception inside ends all of them. mapped:
    files may be mapped where the caller allows it. Weights that move to pinned memory are read instead: the pages of a
    mapping would count beside the copy."""
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
        # A new thread's current device is the first GPU, whatever its creator's is.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), reading(how):
            return load(name)

    with ThreadPoolExecutor(count) as pool:
        try:
            yield lambda name: pool.submit(within, name)
        except BaseException:
            ended.set()
            raise
