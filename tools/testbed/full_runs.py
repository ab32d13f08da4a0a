"""Videos of full runs kept on disk, so that settings are compared again and again without making them anew."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.plan import Plan
from wan_lab.run import Run, make
from wan_lab.samples import Batch


def digest(folder: Path) -> str:
    """A hash of the weights in a folder."""
    digest_of_file = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest_of_file.update(path.read_bytes())
    return digest_of_file.hexdigest()


@dataclass(frozen=True)
class FullRuns:
    """Full runs in `folder`, a file a batch, named after the samples and `about`: all else that decides the videos."""

    folder: Path
    about: dict[str, Any]

    def run(self, pipe: Pipeline, batch: Batch, plan: Plan) -> Run:
        """The batch's full run, made if it is not there."""
        path = self.path(batch)
        if path.is_file():
            tensors = load_file(path)
            return Run(tensors["frames"], float(tensors["seconds"]), int(tensors["forwards"]))
        run = make(pipe, batch, plan)
        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = {"seconds": torch.tensor(run.seconds), "forwards": torch.tensor(run.forwards)}
        save_file({"frames": run.frames.contiguous(), **numbers}, path)
        return run

    def path(self, batch: Batch) -> Path:
        identity = {
            **self.about,
            "samples": [asdict(sample) | {"image": bool(sample.image)} for sample in batch.samples],
        }
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"{name}.safetensors"
