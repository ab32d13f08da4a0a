"""Loads weights on many ranks and reads every byte of a file once per host.

Each rank of a host reads a part of every tensor, copies it to its device and gathers the other parts over NVLink. All
ranks must read the same tensors in the same order, which is that of the file; each converts a value itself. A loader
with reader threads (`checkpoint.staged`) reads the parts of many tensors ahead; otherwise, and on a CPU, files are
mapped. Small tensors, or all if parts cannot be gathered, are read by one rank and broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.checkpoint.opened import Checkpoint, Readers
from wan_core.parallel.mesh import Group, RankMesh, all_gather

SMALL = 1 << 16  # bytes: smaller tensors are not divided
Sharing = Literal["gather", "broadcast"]


def shared_checkpoint(
    checkpoint: Checkpoint, ranks: RankMesh, how: Sharing = "gather", turn: Callable[[], None] = lambda: None
) -> Checkpoint:
    """`checkpoint` with a `read` that returns a tensor on this rank's device and reads it once per host. All ranks of
    the host must read the same tensors in the same order; several checkpoints take turns (`Reading.turn`)."""
    if ranks.host.size == 1:
        return checkpoint
    parts = [part for several in checkpoint.parts.values() for part in several]
    order = {name: i for i, name in enumerate([*checkpoint.tensors, *parts])}
    host = ranks.host

    def gather(whole: Tensor, own: Tensor) -> None:
        turn()
        all_gather(whole, own, host)

    readers = Readers(host.size, host.index, ranks.device, SMALL, gather)

    def read(name: str) -> Tensor:
        turn()
        stored = checkpoint.read(name)
        if how == "gather" and checkpoint.info(name).nbytes > SMALL:
            return gather_read(stored, readers)
        return broadcast_read(stored, host, ranks.device, order[name] % host.size)

    gathers = how == "gather"
    return Checkpoint(
        checkpoint.describe(),
        checkpoint.path,
        checkpoint.tensors,
        checkpoint.metadata,
        read,
        checkpoint.read_packed,
        checkpoint.tokenizer,
        checkpoint.places if gathers else None,
        readers if gathers else None,
        checkpoint.parts,
        checkpoint.attention,
    )


def gather_read(stored: Tensor, readers: Readers) -> Tensor:
    """A mapped tensor `stored` on the readers' device; this rank reads only its part of the bytes."""
    values = stored.contiguous().view(-1).view(torch.uint8)
    part = readers.part(values.numel())
    whole = torch.empty(readers.count * part, dtype=torch.uint8, device=readers.device)
    begin = readers.index * part
    source, target = values[begin : begin + part], whole[begin : begin + part]
    target[: source.numel()].copy_(source)
    readers.gather(whole, target)
    return _value(whole[: values.numel()], stored)


def broadcast_read(stored: Tensor, group: Group, device: torch.device, reader: int) -> Tensor:
    """A mapped tensor `stored` on `device`, read by rank `reader` of the group and broadcast."""
    values = stored.contiguous().view(-1).view(torch.uint8)
    if group.index == reader:
        whole = values.to(device, copy=True)
    else:
        whole = torch.empty(values.numel(), dtype=torch.uint8, device=device)
    if whole.numel():
        dist.broadcast(whole, group.ranks[reader], group=group.process)
    return _value(whole, stored)


def _value(values: Tensor, stored: Tensor) -> Tensor:
    return values.view(stored.dtype).view(stored.shape)
