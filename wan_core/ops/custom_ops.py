"""Custom torch operators: Python functions that a compiler sees as one call with results of known shapes.

What `torch.library.custom_op` does, without importing torch's compiler when an operator first runs (three seconds,
whether anything is compiled or not), and with a quarter of the Python in each call: 9 µs for 38, measured on a CPU.
None of them has a backward: called where gradients are recorded, they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])
NAMESPACE = "wancore"

_library = torch.library.Library(NAMESPACE, "DEF")
# Strides are what they were when the function was traced, whatever a compiler would like better.
_strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)  # the former since torch 2.7
_tags = (torch.Tag.pt2_compliant_tag, _strides)


def operator(
    name: str, shapes: Callable[..., Any] = lambda *_: None, *, mutates_args: Iterable[str] = ()
) -> Callable[[F], F]:
    """Make the decorated function the operator `wancore::name`. Annotations of its arguments and results are the
    schema; nothing that comes back shares memory with an argument.

    shapes: from the same arguments, tensors of the shapes, dtypes and strides of the results, whatever is in them. The
    default is for an operator that returns nothing.
    """

    def define(function: F) -> F:
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates_args))
        _library.define(name + schema, tags=_tags)
        _library.impl(name, without_gradients(name, function), "CompositeExplicitAutograd")
        operation = getattr(getattr(torch.ops, NAMESPACE), name).default
        torch.library.register_fake(operation, shapes, lib=_library)
        return cast(F, operation)

    return define


def allow_variants(count: int) -> None:
    """Let torch compile a function so often before it gives up and runs it uncompiled; by itself it stops after 8. The
    limit is the process's: others get more variants too."""
    import torch._dynamo  # a second to import

    limits = torch._dynamo.config
    name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"  # the latter up to torch 2.6
    setattr(limits, name, max(getattr(limits, name), count))


def without_gradients(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises RuntimeError where a gradient would be lost silently."""

    def call(*arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            refuse_gradients(name, *arguments, *named.values())
        return function(*arguments, **named)

    return call


def refuse_gradients(name: str, *arguments: object) -> None:
    """Raise RuntimeError if gradients are recorded and any of `arguments` requires one."""
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments):
        raise RuntimeError(
            f"{name} has no backward pass, and a gradient was asked for: run it under torch.no_grad(), or train with "
            'plain torch (`wan_core.ops.kernels.fused.use("torch")`, attention sdpa)'
        )
