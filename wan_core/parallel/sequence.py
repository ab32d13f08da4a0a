"""A forward on a shard of the tokens: around the blocks, and in the place of every block's attention.

`ShardedBlocks` stands in the place of `WanModel.run_blocks`: it hands the blocks this rank's tokens with their rows of
the rotation table and of the modulation, and gathers the tokens that come out. Everything in a block works token by
token but self-attention, which `ShardedAttend` takes: Ulysses inside, a ring around it. No shard is padded, so no token
is attended to that does not exist; shards differ by a token, or a row of them, and by a block where sparse attention
goes around a ring.

Legend: B batch, L tokens of the video, n tokens of this rank, C channels, H heads, D head dim, F modulation rows per
sample (1, or one per latent frame).
"""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.config import OptionError, SparseOptions
from wan_core.models.wan.model import PreparedText, WanModel
from wan_core.ops.attention.registry import BACKENDS, Attend, AttendLse
from wan_core.ops.attention.sparse.forward import running
from wan_core.ops.attention.sparse.kernels import KERNELS, expected_block
from wan_core.ops.custom_ops import operator, shapes_of
from wan_core.ops.kernels.formats import FP8, Quantized
from wan_core.parallel.mesh import Group, Mesh, RankMesh, even_parts, gather_parts
from wan_core.parallel.ring import Partial, Ring
from wan_core.parallel.ulysses import heads_for_tokens, tokens_for_heads

FINE = 64  # shards of a video with a timestep for each frame are cut at units of which each has at least so many


def shard_tokens(model: WanModel, ranks: RankMesh, attend: Attend, attend_lse: AttendLse | None = None) -> None:
    """Make the forward of `model` one of all ranks of a sequence, in place; again, with another backend, too."""
    ShardedBlocks.remove(model)
    if ranks.sequence.size == 1:
        return
    sharded = find_sharded(ranks, attend, attend_lse)
    for block in model.blocks:
        block.self_attn.attend = sharded
    model.run_blocks = ShardedBlocks(model, ranks, sharded)


def find_lse(name: str, mesh: Mesh) -> AttendLse | None:
    """The form of the backend `name` that a ring needs; None where the mesh has no ring. Raises OptionError."""
    if mesh.ring == 1:
        return None
    load = BACKENDS[name].lse
    if load is None:
        able = ", ".join(backend.name for backend in BACKENDS.values() if backend.lse is not None)
        raise OptionError(
            f"mesh {mesh} has a ring, and attention {name!r} gives no log-sum-exp to merge its parts by: use a mesh "
            f"without a ring, or one of {able}"
        )
    return load()


def check_mesh(mesh: Mesh, attention: str, tokens: int, sparse: SparseOptions | None) -> None:
    """Raise OptionError now, before anything is loaded, where `mesh` cannot run a video of so many tokens with the
    backend `attention` and `sparse` steps."""
    find_lse(attention, mesh)
    block = 1
    if mesh.ring > 1 and sparse is not None:
        if not reads_parts(sparse):
            able = ", ".join(kernel.name for kernel in KERNELS.values() if kernel.counts)
            raise OptionError(
                f"mesh {mesh} has a ring, of whose parts rows read different numbers of blocks, and sparse kernel "
                f"{sparse.kernel!r} reads as many for every row: use one of auto, {able}, or a mesh without a ring, "
                f"such as {mesh.cfg}x1x{mesh.shards}"
            )
        block = expected_block(sparse.kernel, tokens)
    shard_lengths(tokens, 1, mesh.shards, rings=mesh.ring, block=block)


def reads_parts(sparse: SparseOptions | None) -> bool:
    """Whether `sparse` leaves the choice to a kernel that can read what a row chose from the parts of a ring."""
    return sparse is None or sparse.kernel not in KERNELS or KERNELS[sparse.kernel].counts


def shard_lengths(tokens: int, frames: int, shards: int, *, rings: int = 1, block: int = 1) -> tuple[list[int], int]:
    """How many of `tokens` each shard has, and the tokens of one unit: a shard is a whole number of units, and a unit
    lies in one of `frames` parts that have a modulation row each.

    rings, block: each of `rings` equal parts of the shards has whole blocks of so many tokens, but for the last block.
    """
    if tokens < shards:
        raise OptionError(f"{tokens} tokens cannot be shared by {shards} ranks: use fewer, or a larger video")
    parts, inside, within = [tokens], tokens // frames, shards
    if rings > 1 and block > 1:
        within, blocks = shards // rings, -(-tokens // block)
        parts = [block * count for count in even_parts(blocks, rings)]
        parts[-1] -= -tokens % block
        if min(parts) < within:
            raise OptionError(
                f"{tokens} tokens are {blocks} blocks of {block} for sparse attention, which a ring of {rings} x "
                f"{within} ranks cannot share: use fewer, a larger video, or a mesh without a ring"
            )
        inside = math.gcd(inside, block)  # a multiple of it is where a part ends
    unit = 1
    if frames > 1:
        sizes = (size for size in range(1, inside + 1) if inside % size == 0 and min(parts) // size >= within)
        unit = max((size for size in sizes if tokens // size >= FINE * shards), default=1)
    lengths = [unit * count for part in parts for count in even_parts(part // unit, within)]
    return lengths, tokens if frames == 1 else unit


class ShardedBlocks:
    """In the place of `WanModel.run_blocks`. What it calls is in `run_shard`: residual caches go there, and keep a
    shard."""

    def __init__(self, model: WanModel, ranks: RankMesh, attend: ShardedAttend) -> None:
        self.run_shard: Any = _Plain(model) if "run_blocks" not in vars(model) else model.run_blocks
        self.ranks = ranks
        self.attend = attend

    @staticmethod
    def remove(model: WanModel) -> None:
        """Put back what stood there before, if one is in place."""
        blocks = vars(model).get("run_blocks")
        if isinstance(blocks, ShardedBlocks):
            del model.run_blocks
            if not isinstance(blocks.run_shard, _Plain):
                model.run_blocks = blocks.run_shard

    def __call__(self, tokens: Tensor, modulation: Tensor, rope: Tensor, text: PreparedText) -> Tensor:
        B, L, _ = tokens.shape
        frames, index = modulation.shape[1], self.ranks.shard
        sparse = running.get()  # in whose order the tokens are; in the dense steps beside it too, as residuals are kept
        mesh, block = self.ranks.mesh, 1 if sparse is None else sparse.tiles.block
        lengths, unit = shard_lengths(L, frames, mesh.shards, rings=mesh.ring, block=block)
        begin, end = sum(lengths[:index]), sum(lengths[: index + 1])
        if frames > 1:  # the rows of this shard's units
            rows = torch.arange(begin // unit, end // unit, device=modulation.device) * unit // (L // frames)
            modulation = modulation[:, rows]
        shard = tokens[:, begin:end]
        shard = shard.contiguous() if B > 1 else shard  # of one video it is in one piece already
        self.attend.lengths = lengths
        out = self.run_shard(shard, modulation, rope[begin:end], text)
        return gather_parts(out, lengths, self.ranks.sequence, 1)


class _Plain:
    """The model's own loop over its blocks. The model holds this: a reference back would keep its memory."""

    def __init__(self, model: WanModel) -> None:
        self.model = weakref.ref(model)

    def __call__(self, *given: Any) -> Tensor:
        model = self.model()
        assert model is not None
        return WanModel.run_blocks(model, *given)


# ------------------------------------------------------------------------------------------------------- attention


class ShardedAttend:
    """Attention of this rank's tokens to those of all ranks, behind the signature of every backend.

    `lengths` are the tokens of every shard; whoever runs the blocks sets them. A compiler sees one operator with the
    shape of q, whatever the lengths. No CUDA graph holds it: exchanges of several ranks are not captured.
    """

    capturable = False

    def __init__(self, ranks: RankMesh, attend: Attend, attend_lse: AttendLse | None) -> None:
        assert ranks.mesh.ring == 1 or attend_lse is not None, "a ring merges parts by their log-sum-exp"
        self.ranks, self.attend, self.attend_lse = ranks, attend, attend_lse
        self.dense = attend  # in whose place sparse attention stands for some steps
        self.lengths: list[int] = []
        self.key = f"sharded{next(_COUNT)}"
        _SHARDED[self.key] = self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sharded_attend(q, k, v, self.key)

    def row_lengths(self) -> list[int]:
        """Tokens of the ranks of this rank's Ulysses group."""
        U, mine = self.ranks.mesh.ulysses, self.ranks.ring.index
        return self.lengths[mine * U : (mine + 1) * U]

    def ring_lengths(self) -> list[int]:
        """Tokens of every Ulysses group, around the ring."""
        U = self.ranks.mesh.ulysses
        return [sum(self.lengths[i : i + U]) for i in range(0, len(self.lengths), U)]

    def ring(self, partial: Partial) -> Ring:
        return Ring(self.ranks.ring, self.ring_lengths(), partial, self.ranks.mesh.both_ways)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [B, n, H, D] of this shard -> [B, n, H, D], contiguous."""
        ranks, row = self.ranks, self.row_lengths()
        assert row[ranks.ulysses.index] == q.shape[1], f"{q.shape[1]} tokens in a shard of {row[ranks.ulysses.index]}"
        heads = heads_for_tokens((q, k, v), row, ranks.ulysses)
        over_ring: Any = getattr(self.attend, "over_ring", None)  # of what chooses among the keys of all ranks
        if self.attend_lse is None:
            out = self.attend(*heads)
        elif over_ring is not None:
            out = over_ring(*heads, self.ring(self.attend_lse))
        else:
            out = self.ring(self.attend_lse).attend(*heads)
        return tokens_for_heads(out, q.shape[2], row, ranks.ulysses)


class ShardedFp8Attend(ShardedAttend):
    """The same around an FP8 backend: `quantized` keeps FP8 on the way as well, which halves what is exchanged.

    All ranks must use one scale and take the same vector off their keys, or their numbers would not fit together:
    `agree` is asked for both before anything is rounded.
    """

    def quantized(self, q: Quantized, k: Quantized, v: Quantized) -> Quantized:
        return Quantized(sharded_attend_fp8(q.data, k.data, v.data, q.scale, k.scale, v.scale, self.key), v.scale)

    def agree(self, x: Tensor, how: str) -> Tensor:
        """float32 x of every rank -> their "mean" or "max"."""
        return agree(x, how, self.key)

    def run_quantized(self, q: Quantized, k: Quantized, v: Quantized) -> Tensor:
        ranks, row, backend, dense = self.ranks, self.row_lengths(), self.attend, self.dense
        heads = heads_for_tokens((q.data, k.data, v.data), row, ranks.ulysses)
        scales = (q.scale, k.scale, v.scale)

        def quantized(data: tuple[Tensor, ...]) -> tuple[Quantized, ...]:
            return tuple(Quantized(x.view(FP8), scale) for x, scale in zip(data, scales, strict=True))

        def partial(*given: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = dense.quantized_lse(*quantized(given))  # pyright: ignore[reportFunctionMemberAccess]
            return out.data, lse

        over_ring: Any = getattr(backend, "quantized_over_ring", None)
        if self.attend_lse is None:
            out = backend.quantized(*quantized(heads)).data  # pyright: ignore[reportFunctionMemberAccess]
        elif over_ring is not None:
            out = over_ring(*quantized(heads), self.ring(partial)).data
        else:
            out = self.ring(partial).attend(*heads)
        return tokens_for_heads(out, q.data.shape[2], row, ranks.ulysses)


_COUNT = itertools.count()
_SHARDED: weakref.WeakValueDictionary[str, ShardedAttend] = weakref.WeakValueDictionary()


def find_sharded(ranks: RankMesh, attend: Attend, attend_lse: AttendLse | None) -> ShardedAttend:
    """One object for both experts, which therefore share what is compiled."""
    key = (attend, attend_lse)
    if key not in ranks.made:
        kind = ShardedFp8Attend if hasattr(attend, "quantized") else ShardedAttend
        ranks.made[key] = kind(ranks, attend, attend_lse)
    return ranks.made[key]


@operator("sharded_attend")
def sharded_attend(q: Tensor, k: Tensor, v: Tensor, key: str) -> Tensor:
    return _SHARDED[key].run(q, k, v)


@shapes_of(sharded_attend)
def _(q: Tensor, k: Tensor, v: Tensor, key: str) -> Tensor:
    return q.new_empty(q.shape)


@operator("sharded_attend_fp8")
def sharded_attend_fp8(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, key: str
) -> Tensor:
    """FP8 data and scales [1] -> FP8 [B, n, H, D] under v's scale."""
    sharded = _SHARDED[key]
    assert isinstance(sharded, ShardedFp8Attend)
    return sharded.run_quantized(Quantized(q, q_scale), Quantized(k, k_scale), Quantized(v, v_scale))


@shapes_of(sharded_attend_fp8)
def _(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, key: str) -> Tensor:
    return q.new_empty(q.shape)


def reduce(x: Tensor, how: Any, group: Group) -> None:
    """In place."""
    dist.all_reduce(x, how, group=group.process)


@operator("agree")
def agree(x: Tensor, how: str, key: str) -> Tensor:
    group, agreed = _SHARDED[key].ranks.sequence, x.clone()
    reduce(agreed, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group)
    return agreed.div_(group.size) if how == "mean" else agreed


@shapes_of(agree)
def _(x: Tensor, how: str, key: str) -> Tensor:
    return x.clone()
