"""Weights for many ranks, every byte of a file read once per host.

`shared_checkpoint` stands between a file and a loader. The ranks of a host read a part each of every tensor, move it to
their device and gather the rest from one another, which takes NVLink a tenth of what reading takes. Small tensors, and
all of them where parts cannot be gathered, are read by one rank and broadcast. The ranks must read the same tensors in
the same order, and loaders do: they go by the file. What a loader makes of a value afterwards (another dtype, FP8)
every rank makes for itself.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.checkpoint.opened import Checkpoint
from wan_core.parallel.mesh import Group, RankMesh, all_gather

SMALL = 1 << 16  # bytes: such a tensor is not worth cutting
Sharing = Literal["gather", "broadcast"]


def shared_checkpoint(checkpoint: Checkpoint, ranks: RankMesh, how: Sharing = "gather") -> Checkpoint:
    """`checkpoint`, whose `read` gives a tensor on this rank's device that its host read once. Every rank of the host
    must read alike."""
    if ranks.host.size == 1:
        return checkpoint
    order = {name: i for i, name in enumerate(checkpoint.tensors)}

    def read(name: str) -> Tensor:
        stored = checkpoint.read(name)
        if how == "gather" and checkpoint.tensors[name].nbytes > SMALL:
            return gather_read(stored, ranks.host, ranks.device)
        return broadcast_read(stored, ranks.host, ranks.device, order[name] % ranks.host.size)

    # What is packed (GGUF) every rank takes from the page cache: it is a quarter of the bytes.
    packed = checkpoint.read_packed
    return Checkpoint(checkpoint.describe(), checkpoint.path, checkpoint.tensors, checkpoint.metadata, read, packed)


def gather_read(stored: Tensor, group: Group, device: torch.device) -> Tensor:
    """A tensor that is mapped and not read yet, on `device`: this rank touches its part of the bytes alone."""
    values = stored.contiguous().view(-1).view(torch.uint8)
    part = -(-values.numel() // (group.size * 16)) * 16
    whole = torch.empty(group.size * part, dtype=torch.uint8, device=device)
    mine = values[group.index * part : (group.index + 1) * part]
    own = whole[group.index * part : (group.index + 1) * part]  # in place: what is gathered lands around it
    own[: mine.numel()].copy_(mine)
    all_gather(whole, own, group)
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
