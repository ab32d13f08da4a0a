"""Weights for many ranks, every byte of a file read once per host.

`shared_checkpoint` stands between a file and a loader. The ranks of a host read a part each of every tensor, move it to
their device and gather the rest from one another, which takes NVLink a tenth of what reading takes. The ranks must read
the same tensors in the same order, and loaders do: they go by the file. What a loader makes of a value afterwards
(another dtype, FP8) every rank makes for itself.

A loader that reads by threads (`checkpoint.staged`) learns from `Checkpoint.readers` which part is this rank's, reads
the parts of many tensors ahead, and gathers each when it is asked for; small tensors every rank reads, out of the page
cache. Elsewhere, and on a CPU, files are mapped: `read` then touches this rank's part of the mapping, and small
tensors, or all of them where parts cannot be gathered, are read by one rank and broadcast.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.checkpoint.opened import Checkpoint, Readers
from wan_core.parallel.mesh import Group, RankMesh, all_gather

SMALL = 1 << 16  # bytes: such a tensor is not worth cutting
Sharing = Literal["gather", "broadcast"]


def shared_checkpoint(checkpoint: Checkpoint, ranks: RankMesh, how: Sharing = "gather") -> Checkpoint:
    """`checkpoint`, whose `read` gives a tensor on this rank's device that its host read once. Every rank of the host
    must read alike."""
    if ranks.host.size == 1:
        return checkpoint
    order = {name: i for i, name in enumerate(checkpoint.tensors)}
    host = ranks.host
    readers = Readers(host.size, host.index, ranks.device, SMALL, partial(all_gather, group=host))

    def read(name: str) -> Tensor:
        stored = checkpoint.read(name)
        if how == "gather" and checkpoint.tensors[name].nbytes > SMALL:
            return gather_read(stored, readers)
        return broadcast_read(stored, host, ranks.device, order[name] % host.size)

    gathers = how == "gather"
    return Checkpoint(
        checkpoint.describe(),
        checkpoint.path,
        checkpoint.tensors,
        checkpoint.metadata,
        read,
        checkpoint.read_packed,  # (GGUF) every rank takes it from the page cache: it is a quarter of the bytes
        checkpoint.tokenizer,
        checkpoint.places if gathers else None,
        readers if gathers else None,
    )


def gather_read(stored: Tensor, readers: Readers) -> Tensor:
    """A tensor that is mapped and not read yet, on the readers' device: this rank touches its part of the bytes
    alone."""
    values = stored.contiguous().view(-1).view(torch.uint8)
    part = readers.part(values.numel())
    whole = torch.empty(readers.count * part, dtype=torch.uint8, device=readers.device)
    begin = readers.index * part
    mine, own = values[begin : begin + part], whole[begin : begin + part]  # what is gathered lands around it
    own[: mine.numel()].copy_(mine)
    readers.gather(whole, own)
    return _value(whole[: values.numel()], stored)


def broadcast_read(stored: Tensor, group: Group, device: torch.device, reader: int) -> Tensor:
    """The same, read whole by one rank of the group."""
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
