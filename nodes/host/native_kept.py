"""What is kept of a forward of ComfyUI's own Wan models, and what stands in for a skipped one.

Legend: B batch, L tokens, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wan_core.sampling.cache.residual import Residuals, joined, keep_after, keep_before
from wan_core.sampling.native.attention import qualified

from .native_beside import apart, pause

Forward = Callable[[dict[str, Any]], Tensor]
"""transformer_options -> the model's output."""

# torch.compile may be around the whole model: what changes from step to step is not compiled, or every step would be
# compiled again.
eager = torch.compiler.disable
uncompiled = functools.partial(torch.compiler.disable, recursive=False)  # but what it calls is


def lasting(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that keeps tensors for later forwards."""

    @eager
    @functools.wraps(function)
    def keep(*args: Any) -> Any:
        with pause():
            return function(*args)

    return keep


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
    with apart(options, "reuse"):
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
        made = run(args)
        lasting(keep_after)([(state, made["img"]) for state in states], slots, step, made["img"])
        return made

    options = around(around(options, 0, first), blocks - 1, last)
    with apart(options, "keep"):
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


Ids = tuple[tuple[str, int], ...]
"""(block, id of what replaces it)"""


class Replacements:
    """What other nodes put in the place of blocks (skip-layer guidance), in a run.

    A node may put new objects there in every forward: nothing that was kept of one can be used for the next. So a
    forward is kept only if its replacements were there in an earlier step, and what was not there for a whole step is
    dropped. Until then it is held: no other object gets its id.
    """

    def __init__(self) -> None:
        self.seen: dict[Ids, tuple[int, int, Any]] = {}  # first and last step, and the objects
        self.step = -1
        self.renewed: dict[int, Any] = {}  # steps with replacements that were in no other step, and one of them

    def enter(self, step: int, replaced: Mapping[Any, Any]) -> tuple[Ids, bool]:
        """Which replacements a forward has, and whether it may be kept."""
        if step != self.step:
            for ids, (first, last, objects) in list(self.seen.items()):
                if last != self.step:
                    del self.seen[ids]
                    if ids and first == last:
                        self.renewed[first] = qualified(objects[0])
            self.step = step
        ids = tuple(sorted((str(block), id(patch)) for block, patch in replaced.items()))
        first, _, objects = self.seen.get(ids, (step, step, list(replaced.values())))
        self.seen[ids] = first, step, objects
        return ids, not ids or first != step

    def words(self) -> list[str]:
        """For the report, where a node makes caching impossible."""
        if len(self.renewed) < 2:
            return []
        name = next(iter(self.renewed.values()))
        return [
            f"a new {name} replaced blocks in {len(self.renewed)} steps or more, of which nothing could be used again: "
            "remove that node, or the step cache"
        ]
