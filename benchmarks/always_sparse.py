"""Sparse attention in every forward, for single forwards, which have no plan."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from wan_core.config import SparseOptions
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.ops.attention.tiles import Grid
from wan_core.sampling.sparsity.run import SparseTiles


class AlwaysSparse:
    """The runner with which every layer of every forward reads `keep` of the blocks of keys."""

    name: ClassVar[str] = "sparse tiles, always"
    place: ClassVar[Place] = Place.TILES

    def __init__(self, model: WanModel, keep: float) -> None:
        self.model, self.options = model, SparseOptions(sparsity=1 - keep, dense_steps=0, ramp=0)
        self.tiles: dict[Grid, SparseTiles] = {}

    @classmethod
    def install(cls, model: WanModel, keep: float) -> WanModel:
        cls.remove(model)
        model.runners.add(cls(model, keep))
        return model

    @classmethod
    def remove(cls, model: WanModel) -> None:
        """Have `model` attend to all keys again, if it does not."""
        found = model.runners.find(cls)
        if found is not None:
            found.attend_densely()
            model.runners.remove(cls)

    def attend_densely(self) -> None:
        for tiles in self.tiles.values():
            tiles.install(sparse=False)

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        if inputs.grid not in self.tiles:
            self.attend_densely()  # the tiles of this grid are made around what attends to all keys
            self.tiles[inputs.grid] = SparseTiles(self.model, self.options, inputs.grid)
        info = replace(inputs.info, sparsity=self.options.sparsity)
        return self.tiles[inputs.grid](replace(inputs, info=info), inner)
