"""Sparse self-attention of native models.

The engine orders tokens in tiles once, outside all blocks. Here blocks are ComfyUI's, so q, k and v are put into that
order in every call and the result back. Tokens beside those of the video (reference frames, poses, motion) have no
place in its grid: all queries read them, and their own queries read everything.

Legend: B batch, L query tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from torch import Tensor

from wan_core.config import SparseOptions
from wan_core.ops.attention.protocol import Attention, AttentionCall
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.attention.sparse.forward import SparseForward
from wan_core.ops.attention.sparse.kernels import KERNELS, SparseKernel, block_length, resolve_kernel
from wan_core.ops.attention.sparse.routing import Rule
from wan_core.ops.attention.tiles import Grid, make_tiles
from wan_core.sampling.native.frames import FrameKeys
from wan_core.sampling.native.run import NativeForward
from wan_core.sampling.sparsity.run import wider, with_others

Attend = Callable[[list[Tensor]], Tensor]
"""q, k and v [B, L, H, D], in a list that is emptied once they were read -> [B, L, H, D]"""


def prepare(
    forward: NativeForward,
    transformer_options: Mapping[str, Any],
    qkv: Sequence[Tensor],
    options: SparseOptions,
    dense: Attention | None,
) -> Attend | None:
    """What computes attention of `qkv`, [B, L, H, D] each, or None where this call attends to all keys. dense: what
    computes that, None where it is ComfyUI's."""
    q, k, v = qkv
    run, layer = forward.run, transformer_options.get("block_index")
    if not run.sparsity or k.shape[1] == forward.text:  # a video as long as its text: this may be cross-attention
        return None
    rule = Rule(1 - run.sparsity)
    if layer is None:
        run.note("self-attention read all keys: this model does not say which of its blocks calls")
        return None
    if q.shape[1] != k.shape[1]:
        return prepare_frame(forward, layer, rule, options, q, k, v)
    grid = grid_of(forward, transformer_options, q.shape[1])
    if grid is None:
        run.note(
            f"self-attention of {q.shape[1]} tokens read all keys: which of them are the {prod(forward.grid)} of "
            "the video is not known for this model"
        )
        return None
    if dense is None:
        dense = resolve_attention("auto", q.device, q.dtype, q.shape[-1])[1]
    kernel, block = kernel_of(options, q, q.shape[1], fp8=dense.takes_fp8)
    tiles, rule = with_others(make_tiles(grid, block, q.device), rule, forward.front, q.shape[1])
    state = SparseForward(kernel=kernel, dense=(dense,), tiles=tiles, rule=rule, slope=options.slope)
    run.note_sparse()
    run.take(f"sparse attention ({kernel.name})")
    return partial(attend, state, dense, forward.front)


def kernel_of(options: SparseOptions, q: Tensor, tokens: int, *, fp8: bool) -> tuple[SparseKernel, int]:
    """The kernel for q [B, L, H, D] among so many tokens, and its block."""
    kernel = resolve_kernel(options.kernel, q.device, q.dtype, q.shape[-1], tokens, fp8=fp8)
    return kernel, block_length(kernel, tokens)


def prepare_frame(
    forward: NativeForward, layer: int, rule: Rule, options: SparseOptions, q: Tensor, k: Tensor, v: Tensor
) -> Attend | None:
    """Prepare sparse attention for one frame of queries, see `prepare`. A layer's first has no other tokens."""
    length, tokens = k.shape[1], forward.tokens + forward.frame
    if not forward.by_frames or (options.kernel != "auto" and KERNELS[options.kernel].fp8):
        return None
    kernel, block = kernel_of(options, q, tokens, fp8=False)
    if length == forward.tokens:
        forward.frame_keys = FrameKeys.of(layer, make_tiles(forward.grid, block, q.device), k, v, options.slope)
    state = forward.frame_keys
    if state is None or state.layer != layer or length not in (forward.tokens, tokens):
        return None
    if length == tokens:
        rule = wider(rule, state.tiles.blocks, -(-tokens // block))
    if state.frame == forward.grid[0] - 1:
        forward.frame_keys = None  # the last of the layer
    forward.run.take(f"sparse attention ({kernel.name})")
    return lambda qkv: state.read(qkv[0], qkv[1], qkv[2], rule, kernel)


def attend(state: SparseForward, dense: Attention, front: int, qkv: list[Tensor]) -> Tensor:
    """q, k, v [B, L, H, D] -> [B, L, H, D]. Where no token is beside those of the video, `qkv` is emptied: it is in the
    order of the tiles then. front: tokens before the video's."""
    tokens, video = qkv[0].shape[1], prod(state.tiles.grid)
    extra = [part for part in (slice(0, front), slice(front + video, tokens)) if part.stop > part.start]
    ordered = [(qkv[i] if extra else qkv.pop(0))[:, state.tiles.order] for i in range(3)]
    out = state.attend(AttentionCall(0), *ordered)[:, state.tiles.inverse]
    for part in extra:
        out[:, part] = dense(qkv[0][:, part], qkv[1], qkv[2])
    return out


def grid_of(forward: NativeForward, transformer_options: Mapping[str, Any], length: int) -> Grid | None:
    """Token frames, rows and columns of a sequence of `length` tokens; None where they are not known."""
    frames, rows, columns = forward.grid
    if not forward.front:
        frames, rows, columns = transformer_options.get("grid_sizes") or forward.grid
    extra = length - frames * rows * columns
    if extra < 0:  # Animate-2's pose video: fewer frames of the same size
        return None if length % (rows * columns) else (length // (rows * columns), rows, columns)
    return (frames, rows, columns) if not extra or forward.extra else None
