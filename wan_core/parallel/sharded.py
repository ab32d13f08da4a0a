"""Experts too large for one GPU: every rank holds a part of each block's weights, and gathers a block when it runs.

This is torch's FSDP2 (`fully_shard`) over the ranks that share a sequence: they run the same blocks at the same time.
While one block computes, the next is gathered; what was gathered goes when the block is done. From the file a rank
reads its rows of each matrix and nothing else, so the whole model is at no time on one GPU, nor twice on the host.
What stands outside of the blocks is small and on every rank.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from wan_core.checkpoint import detect, open_checkpoint
from wan_core.checkpoint.detect import empty_module
from wan_core.checkpoint.load import read_values
from wan_core.checkpoint.opened import Checkpoint
from wan_core.config import OptionError
from wan_core.models.wan.model import WanModel
from wan_core.parallel.mesh import RankMesh


def why_not_shard(ranks: RankMesh | None, quantized: bool, compiled: bool, scaled: bool, on_disk: bool) -> str | None:
    """Why experts cannot be held in parts, in words; None where they can."""
    if ranks is None or ranks.sequence.size == 1:
        return "the ranks that share a sequence share the weights too: give several GPUs, and a mesh that is not 2x1x1"
    if quantized or scaled:
        return "it holds bf16 or fp32; FP8 weights are half as large, and mostly fit (resident)"
    if compiled:
        return "torch does not compile blocks whose weights are gathered on the way: leave compile off"
    return None if on_disk else "it reads parts of files: random weights have none"


@torch.no_grad()
def load_sharded_dit(path: Path, ranks: RankMesh, dtype: torch.dtype) -> WanModel:
    """The transformer of `path` on this rank's device, its blocks in parts. Every rank of a sequence must call this
    alike. Raises CheckpointError, or OptionError for what cannot be cut."""
    from torch.distributed.tensor import DTensor  # a second to import

    checkpoint = open_checkpoint(path)
    found = detect(checkpoint, "dit")
    if found.scales or any(info.packing is not None for info in checkpoint.tensors.values()):
        raise OptionError(f"{checkpoint.describe()}: {why_not_shard(ranks, True, False, True, True)}")
    model = cast(WanModel, empty_module(found.config)).to(dtype).requires_grad_(False).eval()
    shard_blocks(model, ranks)
    model.to_empty(device=ranks.device)
    ours = {theirs: name for name, theirs in found.names.items()}
    parameters = dict(model.named_parameters())

    def read(name: str) -> Tensor:
        stored = checkpoint.read(name)
        return part_of(stored, ranks) if isinstance(parameters[ours[name]], DTensor) else stored

    parts = Checkpoint(checkpoint.describe(), checkpoint.path, checkpoint.tensors, checkpoint.metadata, read)
    for name, value in read_values(parts, found, ranks.device, dtype):
        parameter = parameters[name]
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(value)
    return model


def part_of(stored: Tensor, ranks: RankMesh) -> Tensor:
    """This rank's rows, as `fully_shard` cuts them; the last ranks may have none."""
    parts = stored.chunk(ranks.sequence.size)
    index = ranks.sequence.index
    return parts[index] if index < len(parts) else stored[:0]


def shard_blocks(model: WanModel, ranks: RankMesh) -> None:
    """Cut the parameters of the blocks, in place."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    assert ranks.sequence.process is not None
    mesh: Any = DeviceMesh.from_group(ranks.sequence.process, ranks.device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
        attention = block.cross_attn
        attention.kv = GatheredText(block, attention)  # pyright: ignore[reportAttributeAccessIssue]
    inside = {id(parameter) for block in model.blocks for parameter in block.parameters()}
    outside = {parameter for parameter in model.parameters() if id(parameter) not in inside}
    fully_shard(model, mesh=mesh, ignored_params=outside)  # the root knows which block comes next


class GatheredText:
    """In the place of `CrossAttention.kv`, which runs before the blocks do: gathers the block's weights for it."""

    def __init__(self, block: nn.Module, attention: nn.Module) -> None:
        self.block, self.attention = weakref.ref(block), weakref.ref(attention)

    def __call__(self, text: Tensor) -> tuple[Tensor, ...]:
        block: Any = self.block()
        attention: Any = self.attention()
        block.unshard()
        found = type(attention).kv(attention, text)
        block.reshard()
        return found
