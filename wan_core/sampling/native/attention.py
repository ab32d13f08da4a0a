"""Self-attention of native models by the backends of this engine: ComfyUI's `optimized_attention_override`.

ComfyUI calls it in the place of every attention of the transformer. What it does not take (cross-attention, masks, what
a backend cannot compute) goes on to an override that was there before, or to ComfyUI's own function, and is counted.

Legend: B batch, L query tokens, S key tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wan_core.config import SparseOptions
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.registry import BACKENDS, CHOSEN, auto_choice
from wan_core.ops.cards import capability
from wan_core.sampling.native.run import FORWARD, NativeForward
from wan_core.sampling.native.sparse import NativeSparse

Override = Callable[..., Tensor]
COMFYUI = "comfyui"  # in the place of a backend's name: attention to all keys stays ComfyUI's
SHORT = 1024  # keys below which a backend that rounds is not used: nothing to gain
# What ComfyUI may pass beside q, k and v without changing what is computed.
KNOWN = {"heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape", "transformer_options"}
KNOWN |= {"low_precision_attention", "_inside_attn_wrapper"}


class NativeAttention:
    """The override of one model. It keeps no state of a run: that comes with every call, in the options."""

    def __init__(
        self,
        attention: str,
        sparse: SparseOptions | None = None,
        keeps: Sequence[float] | None = None,
        earlier: Override | None = None,
    ) -> None:
        """attention: a backend's name, auto, fast, or COMFYUI. keeps: calibrated shares of the key blocks, by layer.
        earlier: the override that was set before."""
        self.attention, self.earlier = attention, earlier
        self.sparse = None if sparse is None or not sparse.sparsity else NativeSparse(sparse, keeps)
        self._backends: dict[tuple[torch.device, torch.dtype, int], tuple[str, Attention] | str] = {}

    @torch.compiler.disable  # it counts calls, and kernels are not torch's: compiled code goes around it
    def __call__(self, func: Override, *args: Any, **kwargs: Any) -> Tensor:
        """As `func`, ComfyUI's attention: q, k, v [B, L, H * D], or [B, H, L, D] with skip_reshape."""
        forward = (kwargs.get("transformer_options") or {}).get(FORWARD)
        if forward is not None:
            found = why_left(forward, args, kwargs) or self._attend(forward, *args, **kwargs)
            if isinstance(found, Tensor):
                return found
            forward.run.leave(found)
        return func(*args, **kwargs) if self.earlier is None else self.earlier(func, *args, **kwargs)

    def _attend(
        self,
        forward: NativeForward,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        transformer_options: Mapping[str, Any],
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **_: Any,
    ) -> Tensor | str:
        """What `func` would return, or why it is left to it."""
        if skip_reshape:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, L, D] -> [B, L, H, D]
        else:
            q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
        dense = self._backend(q, k.shape[1])
        out = None
        if self.sparse is not None:
            out = self.sparse.attend(
                forward, transformer_options, q, k, v, None if isinstance(dense, str) else dense[1]
            )
        if out is None:
            if isinstance(dense, str):
                return dense
            forward.run.take(dense[0])
            out = dense[1](q, k, v)
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def _backend(self, q: Tensor, keys: int) -> tuple[str, Attention] | str:
        """The name and the backend for q [B, L, H, D], or why there is none."""
        if self.attention == COMFYUI:
            return "self-attention, as chosen"
        key = q.device, q.dtype, q.shape[-1]
        if key not in self._backends:
            name = self.attention
            if name in CHOSEN:
                name = auto_choice(capability(q.device), q.dtype, q.shape[-1], rounding=name == "fast")
            reason = BACKENDS[name].why_not(*key)
            self._backends[key] = (
                (name, BACKENDS[name].load()) if reason is None else f"self-attention ({name} {reason})"
            )
        found = self._backends[key]
        if not isinstance(found, str) and keys < SHORT and not BACKENDS[found[0]].exact:
            return f"self-attention of fewer than {SHORT} tokens"
        return found


def why_left(forward: NativeForward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call is left to ComfyUI, in words that follow a number; None for self-attention that can be taken."""
    if len(args) != 3 or not isinstance(kwargs.get("heads"), int):
        return "calls of an unknown form"
    q, k, v = args
    length, keys = (x.shape[2 if kwargs.get("skip_reshape") else 1] for x in (q, k))
    # Animate-2 attends frame by frame, to the keys of all frames.
    if keys != length and not (keys >= forward.tokens and length == forward.frame):
        return "cross-attention calls"
    if kwargs.get("mask") is not None:
        return "calls with a mask"
    if kwargs.get("low_precision_attention", True) is False or kwargs.get("attn_precision") is not None:
        return "calls that ask for a precision"
    others = sorted(n for n in kwargs.keys() - KNOWN if kwargs[n] is not None and kwargs[n] is not False)
    if others:
        return f"calls with {', '.join(others)}"
    if k.shape[-1] != q.shape[-1] or v.shape != k.shape:
        return "calls with grouped heads"
    if torch.is_grad_enabled() and any(x.requires_grad for x in args):
        return "calls of training"
    return None
