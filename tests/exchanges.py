"""What ranks exchange in a forward, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from wan_core.parallel import conditioning, mesh, ring, sequence


def own(x: Tensor, group: Any) -> int:
    """Bytes of a part that goes to every other rank of the group."""
    return nbytes(x) * (group.size - 1)


def leaving(into: Tensor, out: Tensor, _: Any, sizes: list[int], group: Any) -> int:
    """Bytes of an all-to-all, without the part that stays on this rank."""
    return (out.numel() - sizes[group.index]) * out.element_size()


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


# (module, name of the function there that exchanges, the bytes that this rank sends by its arguments)
EXCHANGES: tuple[tuple[Any, str, Callable[..., int]], ...] = (
    (sequence, "all_to_all", leaving),
    (ring, "pass_on", lambda packed, arriving, group: nbytes(packed)),
    (mesh, "all_gather", lambda into, part, group: own(part, group)),
    (conditioning, "all_gather", lambda into, part, group: own(part, group)),
    (dist, "all_reduce", lambda x, how, group: nbytes(x) * (group.size() - 1)),  # scales that all ranks agree on
)


@contextmanager
def exchanges(counts: dict[str, int]) -> Iterator[None]:
    """Inside, exchanges of a forward add what this rank sends to `counts["bytes"]`."""
    plain = [getattr(module, name) for module, name, _ in EXCHANGES]
    try:
        for (module, name, sent), function in zip(EXCHANGES, plain, strict=True):
            setattr(module, name, _counted(function, sent, counts))
        yield
    finally:
        for (module, name, _), function in zip(EXCHANGES, plain, strict=True):
            setattr(module, name, function)


def _counted(function: Callable[..., Any], sent: Callable[..., int], counts: dict[str, int]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        counts["bytes"] += sent(*given, **named)
        return function(*given, **named)

    return call
