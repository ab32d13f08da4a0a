"""Weights on many ranks: each has all of them and reads a part of the file, or each has a part of them.

**Shared reading** reads every byte of a file once per host. Each rank of a host reads a part of every tensor, copies it
to its device and gathers the other parts over NVLink. All ranks must read the same tensors in the same order, which is
that of the file; each converts a value itself. A loader with reader threads (`checkpoint.staged`) reads the parts of
many tensors ahead; otherwise, and on a CPU, files are mapped. Small tensors are read by one rank and broadcast.

**Sharded experts** are for models too large for one GPU: every rank holds a part of each block's weights. This is
torch's FSDP2 (`fully_shard`) over the ranks of one sequence, which run the same blocks at the same time. A block's
weights are gathered while the previous block computes, and freed after the block. Each rank reads only its rows of each
matrix from the file, so the whole model is never on one GPU, nor twice on the host. Parameters outside of the blocks
are small, and every rank has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wan_core.checkpoint import detect
from wan_core.checkpoint.detect import empty_module
from wan_core.checkpoint.load import read_values
from wan_core.checkpoint.opened import Checkpoint, Readers
from wan_core.config import OptionError
from wan_core.models.wan.layers import Block
from wan_core.models.wan.model import WanModel
from wan_core.parallel.mesh import Group, RankMesh, all_gather

SMALL = 1 << 16  # bytes: smaller tensors are not divided
QUANTIZED = "sharding supports bf16 and fp32 only; FP8 weights are half as large, and mostly fit (resident)"


def shared_checkpoint(checkpoint: Checkpoint, ranks: RankMesh, turn: Callable[[], None] = lambda: None) -> Checkpoint:
    """`checkpoint` with readers that read each tensor once per host, onto this rank's device. All ranks of the host
    must read the same tensors in the same order; several checkpoints take turns (`Reading.turn`)."""
    if ranks.host.size == 1:
        return checkpoint
    parts = [part for several in checkpoint.parts.values() for part in several]
    order = {name: i for i, name in enumerate([*checkpoint.tensors, *parts])}
    host = ranks.host

    def gather(whole: Tensor, own: Tensor) -> None:
        turn()
        all_gather(whole, own, host)

    def read(name: str) -> Tensor:
        turn()
        stored = checkpoint.read(name)
        if checkpoint.info(name).nbytes > SMALL:
            return gather_read(stored, readers)
        return broadcast_read(stored, host, ranks.device, order[name] % host.size)

    readers = Readers(host.size, host.index, ranks.device, SMALL, gather, read)
    return replace(checkpoint, readers=readers)


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


@torch.no_grad()
def load_sharded_dit(
    path: Path, ranks: RankMesh, dtype: torch.dtype, family: str | None = None, turn: Callable[[], None] = lambda: None
) -> WanModel:
    """The transformer of `path` on this rank's device, with sharded blocks. Every rank of a sequence must call this.
    family: where the file does not say. turn: as of `Reading`.

    Raises CheckpointError, or OptionError for quantised weights."""
    from torch.distributed.tensor import DTensor  # imported here because it takes a second

    turn()
    detected = detect(path, "dit", family)
    checkpoint = detected.checkpoint
    if any(info.packing is not None for info in checkpoint.tensors.values()):
        raise OptionError(f"{checkpoint.where}: {QUANTIZED}")
    model = cast(WanModel, empty_module(detected.config)).to(dtype).requires_grad_(False).eval()
    shard_blocks(model, ranks)
    model.to_empty(device=ranks.device)
    official_names = {stored: official for official, stored in detected.names.items()}
    parameters = dict(model.named_parameters())

    def read(name: str) -> Tensor:
        stored = checkpoint.read(name)
        return part_of(stored, ranks) if isinstance(parameters[official_names[name]], DTensor) else stored

    parts = replace(detected, checkpoint=replace(checkpoint, reader=read))
    for name, value in read_values(parts, ranks.device, dtype):
        parameter = parameters[name]
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(value)
    return model


def part_of(stored: Tensor, ranks: RankMesh) -> Tensor:
    """This rank's rows, divided as `fully_shard` does; the last ranks may have none."""
    parts = stored.chunk(ranks.sequence.size)
    index = ranks.sequence.index
    return parts[index] if index < len(parts) else stored[:0]


def shard_blocks(model: WanModel, ranks: RankMesh) -> None:
    """Shard the parameters of the blocks, in place."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    assert ranks.sequence.process is not None
    mesh: Any = DeviceMesh.from_group(ranks.sequence.process, ranks.device.type)
    names = [name for layer in range(len(model.blocks)) for name in model.config.modules_of(layer)]
    blocks = [cast(Block, model.get_submodule(name)) for name in names]
    for block in blocks:
        fully_shard(block, mesh=mesh)
        attention = block.cross_attn
        attention.kv = GatheredText(block, attention)  # pyright: ignore[reportAttributeAccessIssue]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = {parameter for parameter in model.parameters() if id(parameter) not in inside}
    fully_shard(model, mesh=mesh, ignored_params=outside)  # the root module prefetches the next block


class GatheredText:
    """In the place of `CrossAttention.kv`, which runs before the blocks do: gathers the block's weights for it."""

    def __init__(self, block: nn.Module, attention: nn.Module) -> None:
        self.block, self.attention = weakref.ref(block), weakref.ref(attention)

    def __call__(self, *text: Tensor) -> tuple[Tensor, ...]:
        block: Any = self.block()
        attention: Any = self.attention()
        block.unshard()
        keys_values = type(attention).kv(attention, *text)
        block.reshard()
        return keys_values
