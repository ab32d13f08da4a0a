"""CUDA graphs for small videos: where launching the kernels takes longer than running them, replay the launches.

A forward of 40 blocks is more than a thousand launches, and a product with its quantisation takes the host about
0.15 ms (0.25 to 0.3 through Transformer Engine). From a few thousand tokens on, the GPU is busier than the host, and a
graph would only cost memory; below that, the host is the bottleneck, and a graph takes it out.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import RESIDENT, BlockInputs, Place, Run

# Of all samples of a forward together: where an A14B forward takes the GPU what it takes the host.
GRAPHED_TOKENS = 4096


@dataclass
class Captured:
    """A graph with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    modulation: Tensor
    out: Tensor


class Uncollected:
    """No garbage is looked for while any thread is inside. The first turns collection off, the last turns it on again:
    if each put back what it had found, the second would leave it off for good."""

    def __init__(self) -> None:
        self.lock, self.inside, self.enabled = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.enabled = gc.isenabled()
                gc.disable()
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0 and self.enabled:
                gc.enable()


uncollected = Uncollected()


class GraphedBlocks:
    """The runner that replays the blocks for up to `GRAPHED_TOKENS` tokens, and runs them for more.

    A graph knows addresses. One is captured for every shape, rotation table, prompt and strength of control, and goes
    when that table or that prompt goes; should the weights have moved (models that take turns on the device), it is
    captured again. What depends on the step, sparse attention, prompts over time, and weights that stream are not
    captured.
    """

    name: ClassVar[str] = "CUDA graphs"
    place: ClassVar[Place] = Place.GRAPHS

    def __init__(self, model: WanModel) -> None:
        self.model = weakref.ref(model)  # the model holds this: not in a circle, so that its memory goes with it
        self.seen: dict[tuple[object, ...], tuple[int, ...]] = {}  # addresses of the weights then
        self.kept: dict[tuple[object, ...], Captured] = {}

    @staticmethod
    def clear(model: WanModel) -> None:
        """Forget the graphs of `model`, if there are any: what they captured is no longer what would run."""
        graphed = model.runners.find(GraphedBlocks)
        if graphed is not None:
            graphed.kept.clear()
            graphed.seen.clear()

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        model = self.model()
        assert model is not None
        tokens, modulation, rope = inputs.tokens, inputs.modulation, inputs.rope
        small = tokens.shape[0] * tokens.shape[1] <= GRAPHED_TOKENS
        fixed = inputs.sparse is None and inputs.text.bias is None and model.runners.weights is RESIDENT
        if not (small and fixed and tokens.is_cuda) or torch.is_grad_enabled():
            return inner(inputs)
        if torch.cuda.is_current_stream_capturing():
            return inner(inputs)
        weights = tuple(parameter.data_ptr() for parameter in model.parameters())
        prompt = inputs.text.keys_values[0][0]
        key = (tokens.shape, tokens.dtype, modulation.shape, id(rope), id(prompt), len(inputs.text.keys_values[0]))
        key += (inputs.info.control,)
        if self.seen.get(key) != weights:
            # The first time it is launched: that compiles kernels and calibrates scales, and a run of one step needs no
            # graph.
            if key not in self.seen:
                for needed in (rope, prompt):
                    weakref.finalize(needed, forget, weakref.ref(self), key).atexit = False
            self.seen[key] = weights
            self.kept.pop(key, None)
            return inner(inputs)
        graphed = self.kept.get(key)
        if graphed is None:
            graphed = self.kept[key] = self.capture(inputs, inner)
        graphed.tokens.copy_(tokens)
        graphed.modulation.copy_(modulation)
        graphed.graph.replay()
        if inputs.info.after_block is not None:
            inputs.info.after_block()  # a replay is shorter than a block of a large video
        return graphed.out.clone()  # the next replay writes there again

    def capture(self, inputs: BlockInputs, inner: Run) -> Captured:
        """Other threads (ComfyUI's server) may go on using CUDA meanwhile. Garbage is not collected: this thread might
        then free pinned memory of a model that is gone, which ends a capture."""
        tokens, modulation = inputs.tokens.clone(), inputs.modulation.clone()
        # What waits for the device between blocks cannot be captured.
        info = replace(inputs.info, after_block=None)
        inputs = replace(inputs, tokens=tokens, modulation=modulation, info=info)
        graph = torch.cuda.CUDAGraph()
        stream = capture_stream(tokens.device)
        with (
            torch.cuda.device(tokens.device),
            uncollected,
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            out = inner(inputs)
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
