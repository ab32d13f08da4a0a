"""What is kept of a forward of ComfyUI's own Wan models, and what stands in for a skipped one.

Legend: B batch, L tokens, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from wan_core.sampling.cache.residual import Residuals, joined, keep_after, keep_before

from .native_beside import apart, pause

Function = TypeVar("Function", bound=Callable[..., Any])
Forward = Callable[[dict[str, Any]], Tensor]
"""transformer_options -> the model's output."""


# torch.compile may be around the whole model: what changes from step to step is not compiled, or every step would be
# compiled again.
def eager(function: Function) -> Function:
    """Not compiled, nor what it calls."""
    return cast(Function, torch.compiler.disable(function))


def uncompiled(function: Function) -> Function:
    """Not compiled, but what it calls is."""
    return cast(Function, torch.compiler.disable(function, recursive=False))


def lasting(function: Function) -> Function:
    """For a function that keeps tensors for later forwards."""

    @eager
    @functools.wraps(function)
    def keep(*args: Any) -> Any:
        with pause():
            return function(*args)

    return cast(Function, keep)


@eager
def reuse(states: Sequence[Residuals], step: int) -> Tensor:
    """The output of a skipped step, without the model."""
    return joined([state.reused(step) for state in states])


@uncompiled
def keep_output(
    forward: Forward, states: Sequence[Residuals], step: int, options: dict[str, Any], blocks: int
) -> Tensor:
    output = forward(options)
    keep_rows(states, step, output)
    return output


@lasting
def keep_rows(states: Sequence[Residuals], step: int, output: Tensor) -> None:
    for state, rows in zip(states, output.chunk(len(states)), strict=True):
        if (slot := state.slot(step, rows)) is not None:
            slot.copy_(rows)
            state.filled(step)


@eager
def add_reused(states: Sequence[Residuals], step: int, tokens: Tensor) -> Tensor:
    rows = zip(states, tokens.chunk(len(states)), strict=True)
    return joined([state.reused(step, part) for state, part in rows])


@uncompiled
def reuse_blocks(
    forward: Forward, states: Sequence[Residuals], step: int, options: dict[str, Any], blocks: int
) -> Tensor:
    """The first block adds what all of them added, the others nothing."""

    def first(args: dict[str, Any], run: Any) -> dict[str, Any]:
        return {"img": add_reused(states, step, args["img"])}

    for block in range(blocks):
        options = around(options, block, first if block == 0 else lambda args, run: {"img": args["img"]})
    with apart(options, "reuse"):  # pyright: ignore[reportCallIssue] # torch types what it disables as its own class
        return forward(options)


@uncompiled
def keep_blocks(
    forward: Forward, states: Sequence[Residuals], step: int, options: dict[str, Any], blocks: int
) -> Tensor:
    """Keeps the tokens before the first block and what the last has made of them, where the program of a state has a
    slot for the step. Where none has, the hooks are the same: compiled code of both is one."""
    slots: list[Tensor | None] = []

    def first(args: dict[str, Any], run: Any) -> dict[str, Any]:
        slots[:] = lasting(keep_before)(list(zip(states, args["img"].chunk(len(states)), strict=True)), step)
        return run(args)

    def last(args: dict[str, Any], run: Any) -> dict[str, Any]:
        output = run(args)
        lasting(keep_after)([(state, output["img"]) for state in states], slots, step, output["img"])
        return output

    options = around(around(options, 0, first), blocks - 1, last)
    with apart(options, "keep"):  # pyright: ignore[reportCallIssue] # torch types what it disables as its own class
        return forward(options)


def around(options: dict[str, Any], block: int, replacement: Callable[..., Any]) -> dict[str, Any]:
    """A copy of `options` with replacement(args, run) in the place of a block; `run` is what was there."""
    replaced = options.get("patches_replace", {})
    there = replaced.get("dit", {}).get(("double_block", block))

    @uncompiled  # or the step of the first forward would be a constant of the compiled code
    def patch(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        return replacement(args, extra["original_block"] if there is None else lambda args: there(args, extra))

    dit = {**replaced.get("dit", {}), ("double_block", block): patch}
    return {**options, "patches_replace": {**replaced, "dit": dit}}
