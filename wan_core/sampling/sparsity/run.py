"""A plan's sparsity carried out: tokens in tiles, and sparse attention in the place of the model's own.

Legend: B batch, L tokens, C channels, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from wan_core.config import SparseOptions
from wan_core.models.wan.model import PreparedText, WanModel
from wan_core.ops.attention.registry import BACKENDS, Attend
from wan_core.ops.attention.sparse.forward import (
    Forward,
    Observer,
    SparseAttention,
    SparseBehindFp8,
    SparseFp8Attention,
    forward,
)
from wan_core.ops.attention.sparse.kernels import SparseKernel, block_length, resolve_kernel
from wan_core.ops.attention.sparse.routing import Route, Rule
from wan_core.ops.attention.sparse.tiles import Grid, Tiles, make_tiles
from wan_core.sampling.plan import Branch, Plan, Step


class SparseBlocks:
    """In the place of `WanModel.run_blocks` for one phase: the outermost wrapper.

    Tokens are put into the order of the tiles before the blocks, with the table that rotates them, and back after. All
    steps of a phase run in that order, dense ones too, so that residuals kept from one fit another. What shards tokens
    or keeps residuals stands beneath (`run_shard`), and sees the order of the tiles.

    Attention over all keys does not depend on their order: dense steps have the attention that was there.
    """

    def __init__(
        self,
        model: WanModel,
        options: SparseOptions,
        keeps: Sequence[float] | None,
        grid: Grid,
        *,
        image: bool = False,
        observe: Observer | None = None,
    ) -> None:
        before = model.run_blocks
        # Graphs would replay what the step that was captured did: what they stand for is run instead.
        self.run_shard: Callable[..., Tensor] = getattr(before, "inner", before)
        self.options, self.grid, self.image, self.observe = options, grid, image, observe
        self.seams = [attend_seam(block.self_attn) for block in model.blocks]
        ranks = getattr(self.seams[0][0], "ranks", None)  # of what exchanges tokens for heads around it
        ring = ranks is not None and ranks.mesh.ring > 1
        assert not ring or observe is None, "what is measured must see all keys"
        self.dense: list[Attend] = [getattr(holder, name) for holder, name in self.seams]
        weight, tokens = model.patch_embedding.weight, grid[0] * grid[1] * grid[2]
        head_dim = model.config.head_dim
        self.kernel = find_kernel(options, self.dense[0], weight.device, weight.dtype, head_dim, tokens, ring=ring)
        self.block = block_length(self.kernel, tokens)
        fp8 = self.kernel.fp8 and observe is None  # who looks on wants to see numbers
        behind_fp8 = ranks is not None and hasattr(self.dense[0], "quantized")
        plain = SparseBehindFp8() if behind_fp8 else SparseAttention()
        self.attend = SparseFp8Attention(self.block) if fp8 else plain
        self.keeps = keeps
        self.routes: dict[Any, tuple[int, Rule, Route]] = {}
        self.table: tuple[Tensor, Tiles, Tensor] | None = None
        self.step: Step | None = None
        self.branches: tuple[Branch, ...] = ()
        self.computed: list[int] = []  # sparse steps so far

    def expect(self, step: Step, branches: tuple[Branch, ...], skip: bool = False) -> None:
        """What the next forward is. skip: its blocks do not run."""
        self.step, self.branches = step, branches
        if step.sparsity and not skip and step.index not in self.computed:
            self.computed.append(step.index)
        self.install(step.sparsity > 0)

    def install(self, sparse: bool) -> None:
        for (holder, name), dense in zip(self.seams, self.dense, strict=True):
            wanted = self.attend if sparse else dense
            if getattr(holder, name) is not wanted:
                setattr(holder, name, wanted)

    def rules(self, sparsity: float) -> list[Rule | None]:
        """Of every layer; None for one that reads everything."""
        options, layers = self.options, len(self.seams)
        if sparsity == 0:
            return [None] * layers
        shared = self.keeps is not None and sparsity == options.sparsity  # what was calibrated is for the full one
        keeps = self.keeps if shared and self.keeps is not None else [1 - sparsity] * layers
        rules: list[Rule | None] = []
        for layer, keep in enumerate(keeps):
            rule = Rule(keep, options.mass, options.floor, "mean" if options.score == "mean" else "spread")
            rules.append(None if layer < options.dense_layers else rule)
        return rules

    def __call__(self, tokens: Tensor, modulation: Tensor, rope: Tensor, text: PreparedText) -> Tensor:
        """tokens [B, L, C], which are overwritten -> [B, L, C]."""
        if self.observe is not None:
            self.install(sparse=True)
        tiles = make_tiles(self.grid, self.block, tokens.device, frames_apart=modulation.shape[1] > 1, image=self.image)
        state = Forward(
            kernel=self.kernel,
            dense=self.dense,
            tiles=tiles,
            rules=self.rules(self.step.sparsity if self.step else 0.0),
            pooled=self.options.pooled,
            step=len(self.computed),
            branches=self.branches,
            reuse=self.options.reuse,
            routes=self.routes,
            observe=self.observe,
        )
        # In the memory that they came in, which whoever calls holds on to: a copy beside it would stay for all blocks.
        tokens.copy_(tokens[:, tiles.order])
        with forward(state):
            result = self.run_shard(tokens, modulation, self.turned(rope, tiles), text)
        return result[:, tiles.inverse]

    def turned(self, rope: Tensor, tiles: Tiles) -> Tensor:
        """The rotation table [L, 1, D / 2, 2] in the order of the tiles, made once."""
        if self.table is None or self.table[0] is not rope or self.table[1] is not tiles:
            self.table = rope, tiles, rope[tiles.order]
        return self.table[2]


class AlwaysSparse:
    """In the place of `run_blocks`: every layer of every forward reads `keep` of the blocks. For measuring single
    forwards, which have no plan."""

    def __init__(self, model: WanModel, keep: float) -> None:
        self.model, self.before = model, model.run_blocks
        self.alone = "run_blocks" not in vars(model)  # what stood there is the class's
        self.options = SparseOptions(sparsity=1 - keep, dense_steps=0, ramp=0)
        self.step = Step(
            index=0, timestep=0, sigma=0, sigma_next=0, expert="high", guidance=1, branches=("cond",), sparsity=1 - keep
        )
        self.made: dict[Grid, SparseBlocks] = {}

    @classmethod
    def install(cls, model: WanModel, keep: float) -> WanModel:
        cls.remove(model)
        model.run_blocks = cls(model, keep)
        return model

    @staticmethod
    def remove(model: WanModel) -> None:
        """Put back what stood there before, if one is in place."""
        sparse = vars(model).get("run_blocks")
        if not isinstance(sparse, AlwaysSparse):
            return
        for blocks in sparse.made.values():
            blocks.install(sparse=False)
        del model.run_blocks
        if not sparse.alone:
            model.run_blocks = sparse.before

    def __call__(self, tokens: Tensor, modulation: Tensor, rope: Tensor, text: PreparedText) -> Tensor:
        grid = self.model.grid
        if grid not in self.made:
            self.model.run_blocks = self.before
            for other in self.made.values():
                other.install(sparse=False)
            self.made[grid] = SparseBlocks(self.model, self.options, None, grid)
            self.model.run_blocks = self
        self.made[grid].expect(self.step, ("cond",))
        return self.made[grid](tokens, modulation, rope, text)


def attend_seam(attention: Any) -> tuple[Any, str]:
    """(holder, name) of the attention that runs on this device. What moves tokens between devices around it decorates
    `SelfAttention.attend` and has what it calls in an attribute `attend`."""
    holder, name = attention, "attend"
    while hasattr(getattr(holder, name), "attend"):
        holder, name = getattr(holder, name), "attend"
    return holder, name


def find_kernel(
    options: SparseOptions,
    dense: Attend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    tokens: int,
    *,
    ring: bool = False,
) -> SparseKernel:
    """The kernel that `options` means here. ring: keys come by in parts, of which a row may read different numbers of
    blocks. Raises AttentionError."""
    fp8, counts = hasattr(dense, "quantized"), ring or options.mass is not None
    return resolve_kernel(options.kernel, device, dtype, head_dim, tokens, fp8=fp8, counts=counts)


def check_kernel(options: SparseOptions, attention: str, device: torch.device, head_dim: int, tokens: int) -> None:
    """Raise AttentionError now where a kernel that was asked for by name cannot run beside the backend `attention`:
    before there is any work to lose."""
    if options.kernel != "auto":
        half, fp8, counts = torch.bfloat16, not BACKENDS[attention].exact, options.mass is not None
        resolve_kernel(options.kernel, device, half, head_dim, tokens, fp8=fp8, counts=counts)


def ring_note(options: SparseOptions, attention: str, device: torch.device, head_dim: int, tokens: int) -> str:
    """What a mesh with a ring changes about the kernel that `auto` takes beside the backend `attention`, in words; ""
    where it changes nothing."""
    if options.kernel != "auto":
        return ""
    alone, ring = (
        resolve_kernel(
            "auto", device, torch.bfloat16, head_dim, tokens, fp8=not BACKENDS[attention].exact, counts=counts
        ).name
        for counts in (options.mass is not None, True)
    )
    if alone == ring:
        return ""
    return (
        f"sparse attention: kernel {ring} in place of {alone}, which reads as many blocks for every row, and rows read "
        "different numbers of the parts of a ring"
    )


@contextmanager
def sparse_attention(
    model: WanModel, plan: Plan, phase: Sequence[Step], latents: tuple[int, ...], image: bool = False
) -> Iterator[SparseBlocks | None]:
    """Sparse attention on `model` while `phase` runs; None where no step of it has any. latents: (T, Y, X) of the
    latents. image: the video starts from one. Nothing stays behind, whatever happens."""
    if plan.sparse is None or not any(step.sparsity for step in phase):
        yield None
        return
    patch = model.config.patch_size
    grid = latents[0] // patch[0], latents[1] // patch[1], latents[2] // patch[2]
    keeps = dict(plan.keeps).get(phase[0].expert) if plan.sparse.budgets else None
    with in_tiles(model, SparseBlocks(model, plan.sparse, keeps, grid, image=image)) as blocks:
        yield blocks


@contextmanager
def in_tiles(model: WanModel, blocks: SparseBlocks) -> Iterator[SparseBlocks]:
    """`blocks` in the place of the blocks of `model`."""
    before = vars(model).get("run_blocks")
    model.run_blocks = blocks
    try:
        yield blocks
    finally:
        blocks.install(sparse=False)
        if before is None:
            del model.run_blocks
        else:
            model.run_blocks = before
