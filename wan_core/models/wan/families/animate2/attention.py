"""Attention of Animate-2: a frame of the video sees all frames, and its frame of the driving video.

Both are parts of the keys of one softmax. They are computed apart and merged by log-sum-exp, so that no kernel needs a
mask, and keys and values of the driving video, which do not depend on the step, are computed once.

Legend: B batch, L tokens of the video, M tokens of the driving video, n tokens of a frame, H heads, D head dim. Frame 0
of the video is the reference picture and has no driving frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wan_core.config.checks import OptionError
from wan_core.models.wan.families.animate2 import FORMS, Form
from wan_core.models.wan.families.animate2.kept import Kept, Layer, kept_layer
from wan_core.ops.attention.parts import merge, merge_lse
from wan_core.ops.attention.protocol import SINGLE, Attention, AttentionCall, Ring

AT_ONCE = 8192  # tokens of driven frames that are merged at a time


@dataclass(frozen=True)
class Recording:
    """`AttentionCall.own` of the pass over the driving video: keeps the keys and values of every layer, values times
    `factor`."""

    form: Form = FORMS[0]
    factor: float = 1.0
    layers: dict[int, Layer] = field(default_factory=dict)

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v [B, M, H, D] of one layer."""
        self.layers[layer] = kept_layer(k, v if self.factor == 1.0 else v * self.factor, self.form)


@dataclass(frozen=True)
class Driven:
    """`AttentionCall.own` of a pass over the video.

    frame: tokens of a frame. keys, values: [B or 1, M, H, D] of the driving video in this layer; None: there is none.
    log_scale: added to the scores of the keys of frame 1. reference_strength: factor on the values of frame 0.
    """

    frame: int
    keys: Kept | None = None
    values: Kept | None = None
    log_scale: float = 0.0
    reference_strength: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether nothing differs from attention of all tokens to all tokens."""
        return self.keys is None and self.log_scale == 0.0 and self.reference_strength == 1.0


class DrivenAttention(Attention):
    """Around a backend. It gives the backend plain numbers: one that computes in FP8 quantises each part by itself.

    Sparse attention takes the place of the backend for the frames of the video; driving frames are always read whole.
    """

    def __init__(self, inner: Attention, dense: Attention | None = None) -> None:
        """inner: reads the video's frames, sparsely in some steps. dense: the backend, which reads everything."""
        self.inner, self.dense = inner, inner if dense is None else dense
        self.capturable, self.gives_lse = inner.capturable, self.dense.gives_lse

    @property
    def local(self) -> Attention:
        return self.dense

    def around(self, local: Attention) -> Attention:
        return DrivenAttention(local, self.dense)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> Tensor:
        own = call.own
        if isinstance(own, Recording):
            own.keep(call.layer, k, v)
            return self.dense(q, k, v)
        assert isinstance(own, Driven), "the attention of Animate-2 was called by another family"
        if own.plain:
            return self.inner(q, k, v, call)
        if call.sparse is None:
            return self.driven(q, k, v, own)
        order, inverse = call.sparse.tiles.order, call.sparse.tiles.inverse
        if self.inner is self.dense:
            return self.driven(q[:, inverse], k[:, inverse], v[:, inverse], own)[:, order]
        assert own.log_scale == 0.0, "blocks of keys are read or not, none is scaled"
        if own.reference_strength != 1.0:
            v = torch.where((order < own.frame)[:, None, None], v * own.reference_strength, v)
        out, lse = self.inner.with_lse(q, k, v, call)
        return self.add_driving(q[:, inverse], out[:, inverse], lse[..., inverse], 0, own)[:, order]

    def driven(self, q: Tensor, k: Tensor, v: Tensor, own: Driven) -> Tensor:
        """Full attention of all tokens, in their own order."""
        out, lse = merge_lse(list(self.parts(q, k, v, 0, own)))
        return self.add_driving(q, out, lse, 0, own)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> tuple[Tensor, Tensor]:
        return self.dense.with_lse(q, k, v)

    def over_ring(self, q: Tensor, k: Tensor, v: Tensor, ring: Ring, call: AttentionCall) -> Tensor:
        own = call.own
        if isinstance(own, Recording):
            own.keep(call.layer, *(ring.gather(x.contiguous(), ring.lengths, 1) for x in (k, v)))
            return ring.attend(q, k, v)
        assert isinstance(own, Driven), "the attention of Animate-2 was called by another family"
        if call.sparse is not None:
            raise OptionError("sparse attention of Animate-2 around a ring is not supported: use a mesh without a ring")
        begins = [sum(ring.lengths[:rank]) for rank in range(len(ring.lengths))]
        parts = [p for rank, keys, values in ring.around(k, v) for p in self.parts(q, keys, values, begins[rank], own)]
        out, lse = merge_lse(parts)
        return self.add_driving(q, out, lse, begins[ring.index], own)

    def parts(self, q: Tensor, k: Tensor, v: Tensor, begin: int, own: Driven) -> Iterator[tuple[Tensor, Tensor]]:
        """Attention to the video's keys and values [B, N, H, D], of which the first is token `begin`: outputs with
        their log-sum-exps, to be merged."""
        end, n = begin + k.shape[1], own.frame
        if own.reference_strength != 1.0 and begin < n:
            v = torch.cat([v[:, : n - begin] * own.reference_strength, v[:, n - begin :]], 1)
        first, last = (min(max(edge, begin), end) - begin for edge in (n, 2 * n))  # of frame 1, in this part
        if own.log_scale == 0.0 or first == last:
            yield self.dense.with_lse(q, k, v)
            return
        scaled, lse = self.dense.with_lse(q, k[:, first:last], v[:, first:last])
        yield scaled, lse + own.log_scale
        if last - first < k.shape[1]:
            k, v = (torch.cat([x[:, :first], x[:, last:]], 1) for x in (k, v))
            yield self.dense.with_lse(q, k, v)

    def add_driving(self, q: Tensor, out: Tensor, lse: Tensor, begin: int, own: Driven) -> Tensor:
        """Merge attention to the driving frames into `out` [B, N, H, D], of queries of which the first is token
        `begin`, a few frames at a time."""
        if own.keys is None or own.values is None:
            return out
        out = out.contiguous()
        rows = own.keys.shape[0]
        for first in range(0, q.shape[0], rows):  # several branches of the same videos
            some = slice(first, first + rows)
            for start, stop, frames in spans(begin, begin + q.shape[1], own.frame, AT_ONCE):
                here = slice(start - begin, stop - begin)
                there = slice((start // own.frame - 1) * own.frame, (start // own.frame - 1 + frames) * own.frame)
                queries = q[some, here]
                keys, values = (kept[:, there].to(queries.dtype) for kept in (own.keys, own.values))
                found = self.by_frame(queries, keys, values, frames)
                out[some, here] = merge([(out[some, here], lse[some, :, here]), found])
        return out

    def by_frame(self, q: Tensor, k: Tensor, v: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """Attention of the queries of each of `frames` frames to the keys of one driving frame, and its log-sum-exp."""
        if frames == 1:
            return self.dense.with_lse(q, k, v)
        B = q.shape[0]
        q, k, v = (x.unflatten(1, (frames, -1)).flatten(0, 1) for x in (q, k, v))
        out, lse = self.dense.with_lse(q, k, v)
        lse = lse.unflatten(0, (B, frames)).transpose(1, 2).flatten(2)  # [B * frames, H, n] -> [B, H, frames * n]
        return out.unflatten(0, (B, frames)).flatten(1, 2), lse


def spans(begin: int, end: int, frame: int, at_once: int) -> Iterator[tuple[int, int, int]]:
    """The tokens begin..end of frames 1, 2, ... in pieces (start, stop, frames): whole frames, about `at_once` tokens
    of them, or a part of one."""
    start = max(begin, frame)
    while start < end:
        whole = (end - start) // frame if start % frame == 0 else 0
        frames = min(whole, max(1, at_once // frame))
        stop = start + frames * frame if frames else min(end, (start // frame + 1) * frame)
        yield start, stop, max(1, frames)
        start = stop


def finite_scale(log_scale: float) -> float:
    """`log_scale`, if it is a number. Raises ValueError."""
    if not math.isfinite(log_scale):
        raise ValueError(f"log_scale {log_scale} given; it must be a number: 0, or -1.3 for distilled weights")
    return log_scale
