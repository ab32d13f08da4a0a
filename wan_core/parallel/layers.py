"""The layer pipeline: each rank holds a part of the blocks, and tokens are handed from one to the next once a forward.

The guidance branches of a step follow each other: while the second rank runs the conditional branch, the first runs the
unconditional one. Every rank has 1/N of the blocks in memory. With two branches and N ranks a step takes 1 + 1/N of one
branch's forward instead of two, so that two ranks are 4/3 times as fast as one. Results equal those of one rank bit
for bit: the same blocks compute the same tokens. Steps without guidance gain memory alone.

The last rank knows the velocity and sends it to all, so that each has the same latents. Every rank embeds the latents
and runs the head, which is little; only what the first embeds and the last projects is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import family_of
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.parallel.mesh import Mesh, RankMesh, even_parts
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Branch

IN_FLIGHT = 2  # hand-overs of a rank that the next one has not taken yet


def stage_layers(layers: int, ranks: RankMesh) -> range:
    """The blocks of this rank, of a model that has so many."""
    counts, index = even_parts(layers, ranks.layers.size), ranks.layers.index
    return range(sum(counts[:index]), sum(counts[: index + 1]))


def check_layers(mesh: Mesh, config: DiTConfig, plan: Plan) -> None:
    """Raise OptionError where `plan` does not go through a layer pipeline."""
    if mesh.layers == 1:
        return
    why = None
    if config.num_layers < mesh.layers:
        why = f"the transformer has {config.num_layers} blocks: use at most as many ranks"
    elif not family_of(config).layer_pipeline:
        why = f"models of the family {config.family} add tokens between blocks, which are not handed over"
    elif plan.sparse is not None:
        why = "sparse attention chooses blocks for several layers at once: leave it out"
    elif any(step.skipped for step in plan.steps):
        why = "step caching keeps what all blocks add together: leave it out"
    if why is not None:
        raise OptionError(f"mesh {mesh} does not go with this run; {why}, or use another mesh")


class LayerStage:
    """The runner that takes tokens from the rank before, and hands on what comes out of this rank's blocks."""

    name: ClassVar[str] = "layer pipeline"
    place: ClassVar[Place] = Place.SHARDS

    def __init__(self, ranks: RankMesh) -> None:
        self.group = ranks.layers
        self.sent: list[tuple[Any, Tensor]] = []  # tokens stay as they are until they have arrived

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        group, tokens = self.group, inputs.tokens.contiguous()
        if group.index > 0:
            dist.recv(tokens, group.ranks[group.index - 1], group=group.process)
        out = inner(replace(inputs, tokens=tokens)).contiguous()
        assert out.dtype == tokens.dtype and out.shape == tokens.shape
        if group.index + 1 < group.size:
            while len(self.sent) >= IN_FLIGHT:
                self.sent.pop(0)[0].wait()
            self.sent.append((dist.isend(out, group.ranks[group.index + 1], group=group.process), out))
        return out


class FollowingBranches:
    """The `run_branches` of `denoise` where the branches follow each other through the ranks."""

    def __init__(self, ranks: RankMesh) -> None:
        self.group = ranks.layers

    def __call__(
        self, branches: Sequence[Branch], forward: Callable[[Branch], Tensor], velocity: tuple[int, ...]
    ) -> dict[Branch, Tensor]:
        """The velocity of every branch, float32, the same numbers on every rank."""
        predictions = torch.stack([forward(branch) for branch in branches])
        dist.broadcast(predictions, self.group.ranks[-1], group=self.group.process)
        return dict(zip(branches, predictions.unbind(), strict=True))
