"""CUDA graphs for small videos: where launching the kernels takes longer than running them, replay the launches.

A forward of 40 blocks is more than a thousand launches, and a product with its quantisation takes the host about
0.15 ms (0.25 to 0.3 through Transformer Engine). From a few thousand tokens on, the GPU is busier than the host, and a
graph would only cost memory; below that, the host is the bottleneck, and a graph takes it out.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from wan_core.execution.process_settings import uncollected
from wan_core.models.wan.model import PreparedText, WanModel

GRAPHED_TOKENS = (
    4096  # of all samples of a forward together: where an A14B forward takes the GPU what it takes the host
)


@dataclass
class Captured:
    """A graph with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    modulation: Tensor
    out: Tensor


class GraphedBlocks:
    """In the place of `WanModel.run_blocks`: replays it for up to `GRAPHED_TOKENS` tokens, calls it for more.

    A graph knows addresses. One is captured for every shape, rotation table and prompt, and goes when that table or
    that prompt goes; should the weights have moved (models that take turns on the device), it is captured again.
    """

    def __init__(self, model: WanModel) -> None:
        self.model = weakref.ref(model)  # the model holds this: not in a circle, so that its memory goes with it
        self.previous = model.__dict__.get("run_blocks")
        self.seen: dict[tuple[object, ...], tuple[int, ...]] = {}  # addresses of the weights then
        self.kept: dict[tuple[object, ...], Captured] = {}

    @staticmethod
    def clear(model: WanModel) -> None:
        """Forget the graphs of `model`, if there are any: what they captured is no longer what would run."""
        blocks = model.__dict__.get("run_blocks")
        if isinstance(blocks, GraphedBlocks):
            blocks.kept.clear()
            blocks.seen.clear()

    @staticmethod
    def remove(model: WanModel) -> None:
        """Put back what stood there before, if one is in place."""
        blocks = model.__dict__.get("run_blocks")
        if isinstance(blocks, GraphedBlocks):
            del model.run_blocks
            if blocks.previous is not None:
                model.run_blocks = blocks.previous

    @classmethod
    def install(cls, model: WanModel) -> None:
        """Put one in place, if there is none yet."""
        if not isinstance(model.__dict__.get("run_blocks"), cls):
            model.run_blocks = cls(model)

    def inner(self, tokens: Tensor, modulation: Tensor, rope: Tensor, text: PreparedText) -> Tensor:
        """What stood here before."""
        if self.previous is not None:
            return self.previous(tokens, modulation, rope, text)
        model = self.model()
        assert model is not None
        return WanModel.run_blocks(model, tokens, modulation, rope, text)

    def __call__(self, tokens: Tensor, modulation: Tensor, rope: Tensor, text: PreparedText) -> Tensor:
        small = tokens.shape[0] * tokens.shape[1] <= GRAPHED_TOKENS
        if not small or not tokens.is_cuda or torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing():
            return self.inner(tokens, modulation, rope, text)
        model = self.model()
        assert model is not None
        weights = tuple(parameter.data_ptr() for parameter in model.parameters())
        prompt = text.keys_values[0][0]
        key = (tokens.shape, tokens.dtype, modulation.shape, id(rope), id(prompt))
        if self.seen.get(key) != weights:
            # The first time it is launched: that compiles kernels and calibrates scales, and a run of one step needs no
            # graph.
            if key not in self.seen:
                for needed in (rope, prompt):
                    weakref.finalize(needed, forget, weakref.ref(self), key).atexit = False
            self.seen[key] = weights
            self.kept.pop(key, None)
            return self.inner(tokens, modulation, rope, text)
        found = self.kept.get(key)
        if found is None:
            found = self.kept[key] = self.capture(tokens, modulation, rope, text)
        found.tokens.copy_(tokens)
        found.modulation.copy_(modulation)
        found.graph.replay()
        return found.out.clone()  # the next replay writes there again

    def capture(self, tokens: Tensor, modulation: Tensor, rope: Tensor, text: PreparedText) -> Captured:
        """Other threads (ComfyUI's server) may go on using CUDA meanwhile. Garbage is not collected: this thread might
        then free locked memory of a model that is gone, which ends a capture."""
        tokens, modulation = tokens.clone(), modulation.clone()
        graph = torch.cuda.CUDAGraph()
        stream = capture_stream(tokens.device)
        with (
            torch.cuda.device(tokens.device),
            uncollected,
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            out = self.inner(tokens, modulation, rope, text)
        return Captured(graph, tokens, modulation, out)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: cuBLAS keeps 32 MiB of workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


def forget(owner: weakref.ref[GraphedBlocks], key: tuple[object, ...]) -> None:
    """Drop a graph whose rotation table or prompt is gone: its addresses are no longer theirs."""
    blocks = owner()
    if blocks is not None:
        blocks.kept.pop(key, None)
        blocks.seen.pop(key, None)
