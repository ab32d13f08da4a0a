"""The transformers of a task on a rank, without its other models: what the sampler node needs."""

from __future__ import annotations

from dataclasses import replace

from wan_core.config import LoadOptions
from wan_core.execution.report import Report
from wan_core.models.wan.model import WanModel
from wan_core.parallel.mesh import RankMesh
from wan_core.pipeline.load import Models, finish, load_models
from wan_core.pipeline.model_parts import Parts
from wan_core.sampling.plan import Plan


class LoadedExperts:
    """Transformers that ranks load together and share over a mesh that may change. `notes`: of loading."""

    def __init__(self, options: LoadOptions, found: Parts, plan: Plan, ranks: RankMesh) -> None:
        report = Report(ranks.device)
        self.models: Models = load_models(found, options, report, plan, ranks)
        self.notes, self.mesh = report.notes, ranks.mesh

    def fits(self, ranks: RankMesh) -> bool:
        """Whether this mesh can share them: experts that are held in parts belong to the mesh that loaded them."""
        whole = not self.models.sharded and self.mesh.layers == ranks.mesh.layers == 1
        return whole or self.mesh == ranks.mesh

    def arrange(self, ranks: RankMesh, speed: str) -> None:
        """Share the forwards over this mesh from now on, at a word of `speed`."""
        assert self.fits(ranks)
        settings = self.models.settings.at_speed(speed)
        if self.mesh == ranks.mesh and settings is self.models.settings:
            return
        for model in self.models.residency.models.values():
            assert isinstance(model, WanModel)
            finish(model, settings, self.models.device, ranks=ranks)
        self.mesh, self.models = ranks.mesh, replace(self.models, settings=settings)
