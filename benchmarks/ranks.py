"""What all ranks of suite `parallel` share: their meshes, the model, and what was asked for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import plain_model
from benchmarks.setups import Setup
from wan_core.models.wan.model import WanModel
from wan_core.parallel.mesh import Mesh, RankMesh

TIMEOUT = timedelta(minutes=9)  # the other ranks wait while one writes two experts


class Ranks:
    """This rank among all of them. given: the options of the suite, as its first process sent them."""

    def __init__(self, world: RankMesh, given: dict[str, Any]) -> None:
        self.world, self.device, self.given = world, world.device, given
        self.count, self.sizes, self.runs = world.mesh.size, given["sizes"], given["runs"]
        self.dtype = torch.bfloat16 if given["cuda"] and given["dtype"] == "bf16" else torch.float32
        self.meshes = {str(world.mesh): world}

    @property
    def first(self) -> bool:
        return self.world.rank == 0

    def on(self, mesh: Mesh) -> RankMesh:
        """The groups of a mesh of all ranks, made once."""
        key = str(mesh)
        if key not in self.meshes:
            self.meshes[key] = RankMesh.create(mesh, self.device, timeout=TIMEOUT)
        return self.meshes[key]

    def wait(self) -> None:
        dist.barrier(group=self.world.control)

    def plain(self, setup: Setup | None = None) -> tuple[WanModel, int]:
        """The model of `plain_model`, quantised as `setup` says."""
        held = None if setup is None else setup.quantization(self.device)
        return plain_model(self.given["name"], self.device, self.dtype, self.given["layers"], held)
