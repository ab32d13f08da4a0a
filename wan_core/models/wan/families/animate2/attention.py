"""Attention of Animate-2: a frame of the video sees all frames, and its frame of the driving video.

Both are parts of the keys of one softmax. They are computed apart and merged by log-sum-exp, so that no kernel needs a
mask, and keys and values of the driving video, which do not depend on the step, are computed once.

Between steps they are on the device or in host memory, as they are or in FP8. They take as much as the weights or more:
25 GiB for 81 frames at 832x480 in bf16. From host memory each layer's are copied while the layer before computes, into
one of two places on the device; the numbers are the same either way. In FP8, with a scale for each token and head, they
take half, and differ by about 3 %.

Legend: B batch, L tokens of the video, M tokens of the driving video, n tokens of a frame, H heads, D head dim. Frame 0
of the video is the reference picture and has no driving frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wan_core.config.checks import OptionError
from wan_core.config.host_memory import HOST_RESERVE, available_bytes
from wan_core.models.wan.config import TORCH_PER_TOKEN, PreparedForm
from wan_core.models.wan.families.animate2 import FORMS, MORE_PER_TOKEN, PLACES, Form
from wan_core.ops.attention.parts import merge, merge_lse
from wan_core.ops.attention.protocol import SINGLE, Attention, AttentionCall, Ring
from wan_core.ops.attention.registry import lse_missing
from wan_core.ops.kernels.formats import Quantized, quantize_reference

PER_TOKEN = 2 * (TORCH_PER_TOKEN + MORE_PER_TOKEN)  # bytes of a forward over tokens * dim, where no plan says them
RESERVE = 2**29  # at most what a memory plan keeps free
Layer = tuple[Tensor, ...]  # keys and values [B, M, H, D]; or of each the numbers and their scales


Kept = Tensor | Quantized  # the latter with a scale for each token and head


def as_pair(layer: Layer) -> tuple[Kept, Kept]:
    """Keys and values."""
    if len(layer) == 2:
        return layer[0], layer[1]
    return Quantized(layer[0], layer[1]), Quantized(layer[2], layer[3])


def some_tokens(kept: Kept, some: slice, dtype: torch.dtype) -> Tensor:
    """The numbers of some tokens."""
    if isinstance(kept, Tensor):
        return kept[:, some].to(dtype)
    return Quantized(kept.data[:, some], kept.scale[:, some]).dequantize(dtype)


def kept_layer(k: Tensor, v: Tensor, form: Form) -> Layer:
    """Keys and values [B, M, H, D] of one layer in `form`, ready for work on the current stream."""
    layer = (
        (*quantize_reference(k, "row"), *quantize_reference(v, "row")) if form.fp8 else (k.contiguous(), v.contiguous())
    )
    return tuple(to_host(one) for one in layer) if form.on_host else layer


class DeviceLayers:
    """Keys and values of every layer, where the model computes."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers

    @property
    def videos(self) -> int:
        return len(self.layers[0][0])

    def rows(self, start: int, stop: int) -> DeviceLayers:
        return DeviceLayers([tuple(one[start:stop] for one in layer) for layer in self.layers])

    def at(self, layer: int) -> tuple[Kept, Kept]:
        """Keys and values of one layer, ready for work on the current stream."""
        return as_pair(self.layers[layer])


class HostLayers:
    """The same in pinned host memory. `at` is called for one layer after another."""

    def __init__(self, layers: Sequence[Layer], device: torch.device, rows: slice = slice(None)) -> None:
        self.layers, self.device, self.some = layers, device, rows
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.places: list[Layer] = []  # two, on the device
        self.there: list[int | None] = [None, None]  # which layer is in a place, or on its way
        self.used = 0  # the place that was given last

    @property
    def videos(self) -> int:
        return len(self.layers[0][0][self.some])

    def rows(self, start: int, stop: int) -> HostLayers:
        if (start, stop) == (0, self.videos):
            return self
        return HostLayers(self.layers, self.device, slice(start, stop))

    def at(self, layer: int) -> tuple[Kept, Kept]:
        free = 1 - self.used
        if self.there[free] != layer:
            self._copy(layer, free)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        found, self.used = self.places[free], free
        # The other place is that of the layer before, whose work has been launched.
        self._copy((layer + 1) % len(self.layers), 1 - free)
        return as_pair(found)

    def _copy(self, layer: int, place: int) -> None:
        """Start copying a layer into a place, once what reads that place now has computed."""
        given = tuple(one[self.some] for one in self.layers[layer])
        if not self.places:
            self.places = [tuple(torch.empty_like(one, device=self.device) for one in given) for _ in range(PLACES)]
        self.there[place] = layer
        if self.stream is None:
            for target, one in zip(self.places[place], given, strict=True):
                target.copy_(one)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, one in zip(self.places[place], given, strict=True):
                target.record_stream(self.stream)  # freed only when nothing is on its way to it
                target.copy_(one, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """x in pinned memory, copied without making the host wait. Work on the current stream finds it there."""
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return pinned.copy_(x, non_blocking=True)


def choose_form(
    forms: Sequence[PreparedForm], planned: PreparedForm | None, tokens: int, dim: int, device: torch.device
) -> Form:
    """The first of `forms` that fits, from the planned one on; the last where none does. On a CPU all fit.

    A form in host memory that was planned is taken: the plan has counted that memory, and a clip before may have left
    its own to be used again. planned: None where there is no plan; then it must fit beside a forward of `tokens`
    tokens."""
    begin = 0 if planned is None else [one.form for one in forms].index(planned.form)
    activations = int(PER_TOKEN * tokens * dim) if planned is None else planned.activations
    for one in forms[begin:]:
        if device.type != "cuda":
            return one.form
        if one.host:
            free = available_bytes()
            counted = planned is not None and one.form == planned.form
            if counted or free is None or one.host + HOST_RESERVE <= free:
                return one.form
        elif one.device + activations + RESERVE <= free_on(device):
            return one.form
    return forms[-1].form


def free_on(device: torch.device) -> int:
    """Bytes that this process may still take on a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    room = free + torch.cuda.memory_reserved(device) - allocated
    return min(room, int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated)


AT_ONCE = 8192  # tokens of driven frames that are merged at a time


@dataclass(frozen=True)
class Recording:
    """`AttentionCall.own` of the pass over the driving video: keeps keys, and values times `factor`, of every layer."""

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
        """inner: reads the video's frames, sparsely in some steps. dense: the backend, which reads everything. Raises
        OptionError for one that gives no log-sum-exp."""
        self.inner, self.dense = inner, inner if dense is None else dense
        if not self.dense.gives_lse:
            raise OptionError(f"Animate-2 attends to parts of the keys, and {lse_missing(type(self.dense).__name__)}")
        self.gives_lse = self.dense.gives_lse

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
        rows = len(own.keys if isinstance(own.keys, Tensor) else own.keys.data)
        for first in range(0, q.shape[0], rows):  # several branches of the same videos
            some = slice(first, first + rows)
            for start, stop, frames in spans(begin, begin + q.shape[1], own.frame, AT_ONCE):
                here = slice(start - begin, stop - begin)
                there = slice((start // own.frame - 1) * own.frame, (start // own.frame - 1 + frames) * own.frame)
                queries = q[some, here]
                keys, values = (some_tokens(kept, there, queries.dtype) for kept in (own.keys, own.values))
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
