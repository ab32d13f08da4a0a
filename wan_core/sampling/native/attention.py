"""Attention of native models by the backends of this engine: ComfyUI's `optimized_attention_override`.

ComfyUI calls it in the place of every attention of the transformer. What it does not take (masks, what a backend cannot
compute, cross-attention where ComfyUI's is as fast) goes on to ComfyUI's own function, and is counted.

There is one place for an override. One that another node pack set before may change the result, so it stays: it gets
every call first, with ours in place of ComfyUI's function. One that ComfyUI's node Model Attention Backend set before
only says which kernel computes: it gets what ours leaves.

Legend: B batch, L query tokens, S key tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.registry import BACKENDS, CHOSEN, auto_choice
from wan_core.ops.cards import capability, card_of
from wan_core.sampling.native.run import COMPARED, FORWARD, NativeForward
from wan_core.sampling.native.sparse import prepare

Override = Callable[..., Tensor]
COMFYUI = "comfyui"  # in the place of a backend's name: attention to all keys stays ComfyUI's
CROSS, AS_CHOSEN = "cross-attention calls", "self-attention, as chosen"  # why calls are left
UNKNOWN = "calls of an unknown form"
# The backend for the keys of a text. torch takes cuDNN where cards prefer it; ComfyUI has it take FlashAttention 2
# first, which takes twice as long on Hopper.
TEXT, PREFERRED = "sdpa", "cudnn"
# Of queries x keys over queries + 2 keys: rounding reads q, k and v once more, so it pays where both are many. FP8 took
# 1.27 and 1.06 times as long on an H200 at 763 and 1,760, Animate-2's calls for frames of 1,560 and 3,600 tokens
# (templates-h200-20261129, native-h200-20261122), and was faster at 10,920, self-attention at 832x480x81. In between
# nothing was measured. This is 6,144 tokens of self-attention.
PAYS = 2048
# What ComfyUI may pass beside q, k and v without changing what is computed.
KNOWN = {"heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape", "transformer_options"}
KNOWN |= {"low_precision_attention", "_inside_attn_wrapper"}


# The arguments behind q, k and v, in the order of ComfyUI's functions.
POSITIONS = ("heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")


class NativeAttention:
    """The override of one model. It keeps no state of a run: that comes with every call, in the options."""

    def __init__(
        self,
        attention: str,
        *,
        earlier: Override | None = None,
        chosen: Override | None = None,
        original: Override | None = None,
        pause: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """attention: a backend's name, auto, fast, or COMFYUI. earlier: the override that another node pack set
        before. chosen: the one of Model Attention Backend. original: ComfyUI's attention, for calls in containers.
        pause: what is allocated inside it may outlive the forward."""
        self.attention, self.earlier, self.chosen = attention, earlier, chosen
        self.original, self.pause = original, pause
        self._backends: dict[tuple[torch.device, torch.dtype, int, bool, bool], tuple[str, Attention] | str] = {}

    @torch.compiler.disable  # it counts calls, and kernels are not torch's: compiled code goes around it
    def __call__(self, func: Override, *args: Any, **kwargs: Any) -> Tensor:
        """Attention in place of `func`, ComfyUI's own: q, k, v [B, L, H * D], or [B, H, L, D] with skip_reshape."""
        if self.earlier is None:
            return self._compute(func, list(args[:3]), *args[3:], **kwargs)
        return self._behind(self.earlier, func, *args, **kwargs)

    @torch.compiler.disable
    def container_function(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The attention of `__call__` for q, k and v in containers that own them (`AttentionTensorContainer`, ComfyUI
        0.33 and newer): they are freed after they were read. A call that ComfyUI computes gets the containers
        unchanged."""
        assert self.original is not None, "containers without ComfyUI's attention"
        boxes = q, k, v
        if self.earlier is not None:
            return self._behind(self.earlier, self.original, *(box.take() for box in boxes), *args, **kwargs)
        if self.chosen is None and self._left(forward_of(kwargs), (*(box.peek() for box in boxes), *args), kwargs):
            return self.original(q, k, v, *args, **kwargs)
        return self._compute(self.original, [box.take() for box in boxes], *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NativeAttention:
        """Itself: every clone of a MODEL copies its options deeply in ComfyUI 0.8."""
        return self

    def _behind(self, earlier: Override, func: Override, *args: Any, **kwargs: Any) -> Tensor:
        """What `earlier` makes of a call that it gets first."""
        forward = forward_of(kwargs)
        if forward is None or self._left(forward, args, kwargs):
            return earlier(func, *args, **kwargs)

        def ours(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return self._compute(func, [q, k, v], *args, **kwargs)

        before = forward.reached
        out = earlier(ours, *args, **kwargs)
        if forward.reached == before:
            forward.run.take(f"{name_of(earlier)}, which was set before")
        return out

    def _compute(self, func: Override, qkv: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """What `func` returns for q, k and v. The list is emptied when they are not read again."""
        forward = forward_of(kwargs)
        if forward is not None:
            forward.reached += 1
            refused = self._left(forward, (*qkv, *args), kwargs)
            out = None if refused else self._attend(forward, qkv, **by_name(args, kwargs))
            if out is not None:
                return out
        return func(*qkv, *args, **kwargs) if self.chosen is None else self.chosen(func, *qkv, *args, **kwargs)

    def _left(self, forward: NativeForward | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is ComfyUI's. Counts it then."""
        if forward is None:
            return True
        reason = why_left(args, kwargs) or (COMPARED if forward.run.plain else None)
        if reason != UNKNOWN:
            named = by_name(args[3:], kwargs)
            queries, keys = (x.shape[2 if named.get("skip_reshape") else 1] for x in args[:2])
            crosses = forward.crosses(queries, keys)
            if reason is None and (crosses or forward.run.sparse is None):
                dense = self._backend(forward, as_heads(args[:1], **named)[0], keys)
                reason = dense if isinstance(dense, str) else None
            if crosses and (reason or keys != forward.text):
                reason = CROSS
        if reason is not None:
            forward.run.leave(reason)
        return reason is not None

    def _attend(
        self,
        forward: NativeForward,
        qkv: list[Tensor],
        heads: int,
        transformer_options: Mapping[str, Any],
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **_: Any,
    ) -> Tensor | None:
        """What ComfyUI's function returns; None where it computes the call, with `qkv` as it was."""
        shaped = as_heads(qkv, heads, skip_reshape)
        queries, keys = (x.shape[1] for x in shaped[:2])
        crosses = forward.crosses(queries, keys)
        dense = self._backend(forward, shaped[0], keys)
        kernel = None if isinstance(dense, str) else dense[1]
        with self.pause():
            sparse = None
            if forward.run.sparse is not None and not crosses:
                sparse = prepare(forward, transformer_options, shaped, forward.run.sparse, kernel)
            if sparse is not None:
                qkv.clear()
                out = sparse(shaped)
            elif isinstance(dense, str):
                forward.run.leave(dense)
                return None
            else:
                forward.run.take(dense[0], crosses)
                q, k, v = shaped
                out = dense[1](q, k, v)
            return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def _backend(self, forward: NativeForward, q: Tensor, keys: int) -> tuple[str, Attention] | str:
        """The name and the backend for q [B, L, H, D], or why there is none. One that rounds gives way to the card's
        exact one where rounding does not pay, but in sparse runs, whose kernels go with it."""
        if self.attention == COMFYUI:
            return AS_CHOSEN
        crosses = forward.crosses(q.shape[1], keys)
        rounds = forward.run.sparse is not None or pays(q.shape[1], keys)
        key = q.device, q.dtype, q.shape[-1], crosses, rounds
        if key not in self._backends:
            name = self.attention
            if crosses:
                name = TEXT
            elif name in CHOSEN or not (rounds or BACKENDS[name].exact):
                name = auto_choice(capability(q.device), q.dtype, q.shape[-1], rounding=rounds and name == "fast")
            reason = BACKENDS[name].why_not(*key[:3])
            if crosses and PREFERRED not in card_of(capability(q.device)).attention:
                reason = "was not faster on this card"
            self._backends[key] = (
                (name, BACKENDS[name].load()) if reason is None else f"self-attention ({name} {reason})"
            )
        return self._backends[key]


def pays(queries: int, keys: int) -> bool:
    """Whether attention of so many tokens is faster by a backend that rounds q, k and v first."""
    return queries * keys >= PAYS * (queries + 2 * keys)


def why_left(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call is left to ComfyUI, in words that follow a number; None for one that can be taken."""
    if not 3 <= len(args) <= 3 + len(POSITIONS):
        return UNKNOWN
    (q, k, v), kwargs = args[:3], by_name(args[3:], kwargs)
    if not isinstance(kwargs.get("heads"), int):
        return UNKNOWN
    if kwargs.get("mask") is not None:
        return "calls with a mask"
    if kwargs.get("low_precision_attention", True) is False or kwargs.get("attn_precision") is not None:
        return "calls that ask for a precision"
    others = sorted(n for n in kwargs.keys() - KNOWN if kwargs[n] is not None and kwargs[n] is not False)
    if others:
        return f"calls with {', '.join(others)}"
    if k.shape[-1] != q.shape[-1] or v.shape != k.shape:
        return "calls with grouped heads"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "calls of training"
    return None


def forward_of(kwargs: Mapping[str, Any]) -> NativeForward | None:
    """The forward of a call; None outside of a sampling run."""
    return (kwargs.get("transformer_options") or {}).get(FORWARD)


def by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments behind q, k and v: wrappers of other nodes pass some by their position."""
    return {**dict(zip(POSITIONS, args, strict=False)), **kwargs}


def as_heads(qkv: Sequence[Tensor], heads: int, skip_reshape: bool = False, **_: Any) -> list[Tensor]:
    """[B, L, H * D], or [B, H, L, D] with skip_reshape -> [B, L, H, D]"""
    return [x.transpose(1, 2) if skip_reshape else x.unflatten(-1, (heads, -1)) for x in qkv]


def name_of(override: Override) -> str:
    """The words for an override of another node."""
    return f"an attention override ({qualified(override)})"


def qualified(function: Any) -> str:
    """The name of a function or of the class of an object, with that of its module."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"
