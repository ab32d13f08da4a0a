"""LoRAs that are summed into the weights of a transformer in memory, and how they are changed and taken off.

The sums are computed while parameters are read (`wan_core.checkpoint.lora.merge`). Other LoRAs or strengths write the
parameters that change again, in place: read from the file, summed and encoded as when the model was loaded. So nothing
is kept of what was there before, addresses stay as they are (captured graphs and compiled blocks go on), and without
LoRAs every bit is that of a model that never had one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from wan_core.checkpoint.load import read_again
from wan_core.checkpoint.staged import USUAL, Reading
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.loras import Wanted, merging
from wan_core.pipeline.model_parts import is_packed
from wan_core.pipeline.settings import PartToLoad


class MergedLoras:
    """`MergedLoras.of(model)` is the model's own. `parameters`: official names of those that may differ from the file.
    `applied`: which LoRAs are summed in; None while they change, and after a change that was interrupted."""

    def __init__(self) -> None:
        self.parameters: frozenset[str] = frozenset()
        self.applied: tuple[object, ...] | None = ()

    @classmethod
    def of(cls, model: nn.Module) -> MergedLoras:
        """Made when first asked for, and empty then."""
        found = model.__dict__.get("merged_loras")
        if found is None:
            found = model.__dict__["merged_loras"] = cls()
        return found

    def writes_weights(self, wanted: Sequence[Wanted]) -> bool:
        """Whether `apply` would change parameters."""
        return _applied(wanted) != self.applied

    def loaded_with(self, wanted: Sequence[Wanted]) -> None:
        """They were summed in when the model was read."""
        merge = merging(wanted, torch.device("cpu"))
        self.parameters = frozenset() if merge is None else frozenset(merge.changes)
        self.applied = _applied(wanted)

    def apply(
        self,
        model: WanModel,
        wanted: Sequence[Wanted],
        part: PartToLoad,
        device: torch.device,
        how: Reading = USUAL,
    ) -> None:
        """Have just these summed in. part: what `model` was loaded as; one that stays packed is loaded again instead.
        device: where the sums are computed. Weights that stream must all be in host memory. After an interruption, the
        next call writes all that may be changed."""
        if not self.writes_weights(wanted):
            return
        source = part.part.path or part.part.memory
        assert source is not None and not is_packed(part.quantization), "loaded again instead"
        merge = merging(wanted, device)
        changed = frozenset() if merge is None else frozenset(merge.changes)
        self.parameters, self.applied = self.parameters | changed, None
        read_again(
            model,
            source,
            self.parameters,
            device=device,
            dtype=part.dtype,
            quantization=part.quantization,
            loras=merge,
            how=how,
        )
        self.loaded_with(wanted)


def load_with_loras(
    part: PartToLoad, wanted: Sequence[Wanted], device: torch.device, compute: torch.device, how: Reading = USUAL
) -> nn.Module:
    """Read a model to `device`, with LoRAs summed in where that is how they are applied to it. compute: where it will
    run."""
    merged = wanted if part.lora_mode == "merge" else ()
    model = part.load(device, merging(merged, compute), how)
    if isinstance(model, WanModel):
        MergedLoras.of(model).loaded_with(merged)
    return model


def _applied(wanted: Sequence[Wanted]) -> tuple[object, ...]:
    return tuple((one.key, one.strength) for one in wanted if one.strength)
