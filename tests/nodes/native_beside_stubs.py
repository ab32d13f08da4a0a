"""For `native_beside`: what newer versions of ComfyUI have and the one here may not, as stubs with the same hooks.

`SparseNode`: Model Sparse Attention (comfy_extras/nodes_sparse_attention.py). `MemoryPlan`: the compiler that plans the
memory of a forward (comfy/model_prefetch.py, aimdo). `boxed`: transformers that give attention tensors in containers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

OVERRIDE = "optimized_attention_override"


class SparseNode:
    """Computes self-attention from the sigma `start` on, and puts itself on top of other overrides in every step. What
    it leaves goes to the override below, its arguments by position."""

    def __init__(self, start: float) -> None:
        self.start, self.installed, self.batches = start, set(), 0

    def apply(self, model: Any) -> Any:
        from comfy.patcher_extension import CallbacksMP

        clone = model.clone()
        self.install(clone.model_options["transformer_options"])
        clone.add_callback_with_key(
            CallbacksMP.ON_PREPARE_STATE, "block_sparse_attention",
            lambda patcher, timestep, model_options: self.install(model_options["transformer_options"]),
        )  # fmt: skip
        return clone

    def install(self, options: dict[str, Any]) -> None:
        below = options.get(OVERRIDE)
        if below in self.installed:
            return

        def override(
            func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, attn_precision: Any = None,
            skip_reshape: bool = False, skip_output_reshape: bool = False, **kwargs: Any,
        ) -> Tensor:  # fmt: skip
            options = kwargs["transformer_options"]
            self.batches = 2 // len(options["cond_or_uncond"])
            if float(options["sigmas"][0]) > self.start or q.shape != k.shape:
                named = {"mask": mask, "attn_precision": attn_precision, "skip_reshape": skip_reshape,
                         "skip_output_reshape": skip_output_reshape, **kwargs}  # fmt: skip
                return func(q, k, v, heads, **named) if below is None else below(func, q, k, v, heads, **named)
            return v * 0.5

        self.installed.add(override)
        options[OVERRIDE] = override


class MemoryPlan(TorchDispatchMode):
    """While a forward runs, nothing may be allocated that outlives it, but for its output, unless it is paused.
    Raises RuntimeError, as aimdo's plan does."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []
        self.inside = False
        self.forwards = self.paused = 0

    def __enter__(self) -> MemoryPlan:
        import comfy.model_prefetch

        self.prefetch, self.real = comfy.model_prefetch, getattr(comfy.model_prefetch, "pause_malloc_graph", None)
        comfy.model_prefetch.pause_malloc_graph = self.pause
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        if self.real is None:
            del self.prefetch.pause_malloc_graph
        else:
            self.prefetch.pause_malloc_graph = self.real

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.inside:
            inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
            for output in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(output, Tensor) and output.untyped_storage().data_ptr() not in inputs:
                    self.made.append(StorageWeakRef(output.untyped_storage()))
        return out

    @contextmanager
    def pause(self, sync: bool = False) -> Iterator[None]:
        """ComfyUI's pause: it ends with the innermost."""
        active, self.inside = self.inside, False
        self.paused += active
        try:
            yield
        finally:
            self.inside = active

    def around(self, model: Any) -> Any:
        """A model whose forwards are planned, wrappers of other nodes included."""
        transformer = model.model.diffusion_model
        forward = type(transformer).forward

        def planned(*args: Any, **kwargs: Any) -> Tensor:
            self.made, self.inside = [], True
            self.forwards += 1
            try:
                out = forward(transformer, *args, **kwargs)
            finally:
                self.inside = False
            last = out.untyped_storage()._cdata
            alive = [ref for ref in self.made if not ref.expired() and ref.cdata != last]
            if alive:
                raise RuntimeError(f"{len(alive)} tensors of a forward outlive it")
            return out

        transformer.forward = planned
        return model


@contextmanager
def boxed(handed: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """ComfyUI's Wan models give attention q, k and v in containers. handed: called with those of each call."""
    import comfy.ldm.wan.model as wan
    from comfy.ldm.modules.attention import AttentionTensorContainer

    real = wan.optimized_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        boxes = [AttentionTensorContainer(x.clone()) for x in args[:3]]
        handed([box.tensor for box in boxes])
        return real(*boxes, *args[3:], **kwargs)

    wan.optimized_attention = attention
    try:
        yield
    finally:
        wan.optimized_attention = real
