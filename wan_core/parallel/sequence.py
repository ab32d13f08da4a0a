"""A forward on a shard of the tokens: around the blocks, and around every block's attention.

`ShardedTokens` is a runner: it hands the blocks this rank's tokens with their rows of the rotation table and of the
modulation, and gathers the tokens that come out. Everything in a block works token by token but self-attention, which
`ShardedAttention` takes: Ulysses inside, a ring around it. No shard is padded, so no token is attended to that does not
exist; shards differ by a token, or a row of them, and by a block where sparse attention goes around a ring.

Ulysses: ranks trade heads for tokens, so that each attends over all tokens with some of the heads. q, k and v travel in
one exchange, packed so that what arrives needs no sorting: a rank's tokens follow one another in memory, and behind
each token stand its query, key and value. The output goes back in one exchange more. Heads and tokens need not divide:
every rank says how many are whose. Source: DeepSpeed Ulysses, arXiv 2309.14509.

Legend: B batch, L tokens of the video, n tokens of this rank, N tokens of all ranks of the group, C channels, H heads,
h heads of this rank, D head dim, F modulation rows per sample (1, or one per latent frame).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.config import OptionError, SparseOptions
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.ops.attention.protocol import SINGLE, Attention, AttentionCall
from wan_core.ops.attention.registry import BACKENDS, lse_missing
from wan_core.ops.kernels.formats import FP8, Quantized
from wan_core.parallel.mesh import Group, Mesh, RankMesh, all_to_all, as_words, even_parts, gather_parts
from wan_core.parallel.ring import Partial, Ring

Three = tuple[Tensor, Tensor, Tensor]
FINE = 64  # shards of a video with a timestep for each frame are cut at units of which each has at least so many


def shard_tokens(model: WanModel, ranks: RankMesh, attend: Attention) -> None:
    """Make the forward of `model` one of all ranks of a sequence, in place; again, with another backend, too."""
    check_lse(attend.gives_lse, "this backend", ranks.mesh)
    sharded = ShardedAttention(ranks, attend, attend)
    for block in model.blocks:
        block.self_attn.attend = sharded
    model.runners.add(ShardedTokens(ranks))


def check_lse(gives_lse: bool, name: str, mesh: Mesh) -> None:
    """Raise OptionError where `mesh` has a ring and the backend `name` gives no log-sum-exp to merge its parts by."""
    if mesh.ring > 1 and not gives_lse:
        raise OptionError(f"mesh {mesh} has a ring, and {lse_missing(name)}; or a mesh without a ring")


def check_mesh(mesh: Mesh, attention: str, tokens: int, sparse: SparseOptions | None) -> None:
    """Raise OptionError now, before anything is loaded, where `mesh` cannot run a video of so many tokens with the
    backend `attention` and `sparse` steps."""
    check_lse(BACKENDS[attention].gives_lse, attention, mesh)
    if mesh.ring > 1 and sparse is not None:
        without = f"{mesh.cfg}x1x{mesh.shards}"
        raise OptionError(f"mesh {mesh} has a ring, around which attention reads all keys: use {without} with --sparse")
    shard_lengths(tokens, 1, mesh.shards)


def shard_lengths(tokens: int, frames: int, shards: int) -> tuple[list[int], int]:
    """How many of `tokens` each shard has, and the tokens of one unit: a shard is a whole number of units, and a unit
    lies in one of `frames` parts that have a modulation row each."""
    if tokens < shards:
        raise OptionError(f"{tokens} tokens cannot be shared by {shards} ranks: use fewer, or a larger video")
    unit = 1
    if frames > 1:
        inside = tokens // frames
        sizes = (size for size in range(1, inside + 1) if inside % size == 0 and tokens // size >= FINE * shards)
        unit = max(sizes, default=1)
    return [unit * count for count in even_parts(tokens // unit, shards)], tokens if frames == 1 else unit


class ShardedTokens:
    """The runner that hands on this rank's tokens, and gathers the tokens of all ranks after the blocks. What is kept
    below it is kept of a shard."""

    name: ClassVar[str] = "sharded tokens"
    place: ClassVar[Place] = Place.SHARDS

    def __init__(self, ranks: RankMesh) -> None:
        self.ranks = ranks

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        tokens, modulation = inputs.tokens, inputs.modulation
        B, L, _ = tokens.shape
        frames, index = modulation.shape[1], self.ranks.shard
        lengths, unit = shard_lengths(L, frames, self.ranks.mesh.shards)
        begin, end = sum(lengths[:index]), sum(lengths[: index + 1])
        if frames > 1:  # the rows of this shard's units
            rows = torch.arange(begin // unit, end // unit, device=modulation.device) * unit // (L // frames)
            modulation = modulation[:, rows]
        shard = tokens[:, begin:end]
        shard = shard.contiguous() if B > 1 else shard  # of one video it is in one piece already
        rope = inputs.rope[begin:end]
        order = torch.arange(begin, end, device=tokens.device) if inputs.order is None else inputs.order[begin:end]
        out = inner(replace(inputs, tokens=shard, modulation=modulation, rope=rope, lengths=lengths, order=order))
        return gather_parts(out, lengths, self.ranks.sequence, 1)


# ------------------------------------------------------------------------------------------------------- attention


def heads_for_tokens(qkv: Three, lengths: list[int], group: Group) -> Three:
    """q, k, v [B, n, H, D] -> q, k, v [B, N, h, D], views of what arrived. lengths: tokens of each rank of `group`."""
    if group.size == 1:
        return qkv
    dtype, integers = qkv[0].dtype, [as_words(x) for x in qkv]
    B, n, H, D = integers[0].shape
    heads = even_parts(H, group.size)
    sizes = [n * B * 3 * h * D for h in heads]
    packed = integers[0].new_empty(sum(sizes))
    for i, x in enumerate(integers):
        x = x.transpose(0, 1)  # [n, B, H, D]
        if H % group.size == 0:
            into = packed.view(group.size, n, B, 3, heads[0], D)[:, :, :, i]
            into.copy_(x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4))
            continue
        for part, some in zip(packed.split(sizes), x.split(heads, 2), strict=True):
            part.view(n, B, 3, -1, D)[:, :, i].copy_(some)
    h = heads[group.index]
    arrived = packed.new_empty(sum(lengths), B, 3, h, D)
    all_to_all(arrived.flatten(), packed, [length * B * 3 * h * D for length in lengths], sizes, group)
    q, k, v = (x.transpose(0, 1) for x in arrived.view(dtype).unbind(2))
    return q, k, v


def tokens_for_heads(out: Tensor, heads_in_all: int, lengths: list[int], group: Group) -> Tensor:
    """The way back of the output: [B, N, h, D] -> [B, n, H, D], contiguous."""
    if group.size == 1:
        return out.contiguous()
    packed = as_words(out.transpose(0, 1).contiguous())  # [N, B, h, D]
    _, B, h, D = packed.shape
    heads, n = even_parts(heads_in_all, group.size), lengths[group.index]
    sizes = [n * B * some * D for some in heads]
    arrived = packed.new_empty(sum(sizes))
    all_to_all(arrived, packed.flatten(), sizes, [length * B * h * D for length in lengths], group)
    if heads_in_all % group.size == 0:
        joined = arrived.view(group.size, n, B, h, D).permute(2, 1, 0, 3, 4)
        return joined.flatten(2, 3).contiguous().view(out.dtype)
    pieces = [piece.view(n, B, -1, D) for piece in arrived.split(sizes)]
    return torch.cat(pieces, 2).transpose(0, 1).contiguous().view(out.dtype)


class ShardedAttention(Attention):
    """Attention of this rank's tokens to those of all ranks: Ulysses inside, a ring around it.

    FP8 stays FP8 on the way, which halves what is exchanged. All ranks must then use one scale and take the same
    vector off their keys, or their numbers would not fit together: `agree` is asked for both before anything is
    rounded.
    """

    def __init__(self, ranks: RankMesh, local: Attention, dense: Attention) -> None:
        """local: attends on this device, sparsely in some steps. dense: the backend that reads all keys."""
        self.ranks, self._local, self.dense = ranks, local, dense
        self.takes_fp8 = local.takes_fp8
        self.agree = self._agree if local.takes_fp8 else None

    @property
    def local(self) -> Attention:
        return self._local.local

    def around(self, local: Attention) -> Attention:
        return ShardedAttention(self.ranks, self._local.around(local), self.dense)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> Tensor:
        """q, k, v [B, n, H, D] of this shard -> [B, n, H, D], contiguous."""
        ulysses, row = self.ranks.ulysses, self._row_lengths(call)
        assert row[ulysses.index] == q.shape[1], f"{q.shape[1]} tokens in a shard of {row[ulysses.index]}"
        heads = heads_for_tokens((q, k, v), row, ulysses)
        if self.ranks.mesh.ring == 1:
            out = self._local(*heads, call)
        else:
            out = self._local.over_ring(*heads, self._ring(call, self.dense.with_lse), call)
        return tokens_for_heads(out, q.shape[2], row, ulysses)

    def quantized(self, q: Quantized, k: Quantized, v: Quantized, call: AttentionCall = SINGLE) -> Quantized:
        ulysses, row = self.ranks.ulysses, self._row_lengths(call)
        arrived = heads_for_tokens((q.data, k.data, v.data), row, ulysses)

        def with_scales(data: Three) -> tuple[Quantized, Quantized, Quantized]:
            return (
                Quantized(data[0].view(FP8), q.scale),
                Quantized(data[1].view(FP8), k.scale),
                Quantized(data[2].view(FP8), v.scale),
            )

        def partial(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = self.dense.quantized_lse(*with_scales((queries, keys, values)))
            return out.data, lse

        if self.ranks.mesh.ring == 1:
            out = self._local.quantized(*with_scales(arrived), call)
        else:
            out = Quantized(self._ring(call, partial).attend(*(x.view(FP8) for x in arrived)), v.scale)
        return Quantized(tokens_for_heads(out.data, q.data.shape[2], row, ulysses), v.scale)

    def _row_lengths(self, call: AttentionCall) -> list[int]:
        """Tokens of the ranks of this rank's Ulysses group."""
        U, mine = self.ranks.mesh.ulysses, self.ranks.ring.index
        return list(call.lengths[mine * U : (mine + 1) * U])

    def _ring(self, call: AttentionCall, partial: Partial) -> Ring:
        """The ring of Ulysses groups, each with the tokens of all of its ranks."""
        U, lengths = self.ranks.mesh.ulysses, call.lengths
        groups = [sum(lengths[i : i + U]) for i in range(0, len(lengths), U)]
        return Ring(self.ranks.ring, groups, partial)

    def _agree(self, x: Tensor, how: str) -> Tensor:
        """float32 x of every rank -> their "mean" or "max"."""
        group, agreed = self.ranks.sequence, x.clone()
        dist.all_reduce(agreed, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=group.process)
        return agreed.div_(group.size) if how == "mean" else agreed
