"""A plan's sparsity carried out: tokens in tiles, and sparse attention in the place of the model's own.

Legend: B batch, L tokens, C channels, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from wan_core.config import SparseOptions
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sparse.forward import SparseAttention, SparseBehindFp8, SparseForward, SparseFp8Attention
from wan_core.ops.attention.sparse.kernels import block_length, resolve_kernel
from wan_core.ops.attention.sparse.routing import Rule
from wan_core.ops.attention.tiles import Grid, Tiles, make_tiles, with_extra
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Step


class SparseTiles:
    """The runner of one phase that orders the tokens in tiles, and says what attention reads.

    Tokens are put into the order of the tiles before the blocks, with the table that rotates them, and back after. All
    steps of a phase run in that order, so that residuals kept from one fit another. Runners below see it too.
    """

    name: ClassVar[str] = "sparse tiles"
    place: ClassVar[Place] = Place.TILES

    def __init__(self, model: WanModel, options: SparseOptions, grid: Grid) -> None:
        self.options = options
        self.attentions = [block.self_attn for block in model.blocks]
        self.around = [attention.attend for attention in self.attentions]
        self.dense = [attend.local for attend in self.around]
        shared = self.around[0] is not self.dense[0]  # ranks exchange tokens around what attends here
        weight, tokens = model.patch_embedding.weight, grid[0] * grid[1] * grid[2]
        self.kernel = resolve_kernel(
            options.kernel, weight.device, weight.dtype, model.config.head_dim, tokens,
            fp8=self.dense[0].takes_fp8,
        )  # fmt: skip
        self.block = block_length(self.kernel, tokens)
        if self.kernel.fp8:
            sparse = SparseFp8Attention(self.block)
        else:
            sparse = SparseBehindFp8() if shared and self.dense[0].takes_fp8 else SparseAttention()
        made = {id(attend): attend.around(sparse) for attend in self.around}
        self.sparse = [made[id(attend)] for attend in self.around]
        self.table: tuple[Tensor, Tiles, Tensor] | None = None

    def install(self, sparse: bool) -> None:
        """Have the layers attend sparsely, or to all keys."""
        for attention, wanted in zip(self.attentions, self.sparse if sparse else self.around, strict=True):
            attention.attend = wanted

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        """Tokens [B, L, C] in their own order, which are overwritten -> [B, L, C] in their own order."""
        tokens = inputs.tokens
        self.install(sparse=True)  # until `in_tiles` ends, also where a run goes on after memory ran out
        tiles, rule = self.arranged(inputs)
        forward = SparseForward(
            kernel=self.kernel,
            dense=self.dense,
            tiles=tiles,
            rule=rule,
            slope=self.options.slope,
        )
        tokens.copy_(tokens[:, tiles.order])  # in their own memory, which the caller holds: no copy for all blocks
        result = inner(replace(inputs, rope=self.turned(inputs.rope, tiles), sparse=forward, order=tiles.order))
        return result[:, tiles.inverse]

    def arranged(self, inputs: BlockInputs) -> tuple[Tiles, Rule]:
        """The order of all tokens, and what every layer reads. Tokens behind the video's come last, are read by every
        block, and read all."""
        length = inputs.tokens.shape[1]
        others = length > prod(inputs.grid)
        frames_apart = inputs.modulation.shape[1] > 1 and not others
        tiles = make_tiles(inputs.grid, self.block, inputs.tokens.device, frames_apart=frames_apart)
        return with_others(tiles, Rule(1 - inputs.info.sparsity), 0, length)

    def turned(self, rope: Tensor, tiles: Tiles) -> Tensor:
        """The rotation table [L, 1, D / 2, 2] in the order of the tiles, made once."""
        if self.table is None or self.table[0] is not rope or self.table[1] is not tiles:
            self.table = rope, tiles, rope[tiles.order]
        return self.table[2]


def with_others(tiles: Tiles, rule: Rule, front: int, length: int) -> tuple[Tiles, Rule]:
    """The order of all `length` tokens, of which `tiles` order the video's, and what every layer reads of them by
    `rule` for the video alone. front: tokens before the video's."""
    if length == len(tiles.order):
        return tiles, rule
    return with_extra(tiles, front, length), wider(rule, tiles.blocks, -(-length // tiles.block))


def wider(rule: Rule, video: int, blocks: int) -> Rule:
    """`rule` for `video` blocks of a video where others, which are always read, make them `blocks`."""
    return Rule((rule.most(video) + blocks - video) / blocks)


def check_kernel(options: SparseOptions, attention: str, device: torch.device, head_dim: int, tokens: int) -> None:
    """Raise AttentionError now where a kernel that was asked for by name cannot run beside the backend `attention`:
    before there is any work to lose."""
    if options.kernel != "auto":
        resolve_kernel(options.kernel, device, torch.bfloat16, head_dim, tokens, fp8=not BACKENDS[attention].exact)


@contextmanager
def sparse_attention(
    model: WanModel, plan: Plan, phase: Sequence[Step], latents: tuple[int, ...]
) -> Iterator[SparseTiles | None]:
    """Sparse attention on `model` while `phase` runs; None where no step of it has any. latents: (T, Y, X) of the
    video's. Nothing stays behind, whatever happens."""
    if plan.sparse is None or not any(step.sparsity for step in phase):
        yield None
        return
    patch = model.config.patch_size
    grid = latents[0] // patch[0], latents[1] // patch[1], latents[2] // patch[2]
    with in_tiles(model, SparseTiles(model, plan.sparse, grid)) as tiles:
        yield tiles


@contextmanager
def in_tiles(model: WanModel, tiles: SparseTiles) -> Iterator[SparseTiles]:
    """`tiles` in the chain of `model`."""
    try:
        with model.runners.adding(tiles):
            yield tiles
    finally:
        tiles.install(sparse=False)
