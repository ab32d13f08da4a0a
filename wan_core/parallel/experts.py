"""The transformers of a task on a rank, without its other parts: what a sampler's node needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch

from wan_core.attention.registry import resolve_attention
from wan_core.memory.residency import Residency, choose_residency
from wan_core.model.dit import WanModel
from wan_core.models import compute_dtype, find_quantization, forward_bytes, precision_of
from wan_core.optimize import check_compile, optimize
from wan_core.parallel.mesh import RankMesh
from wan_core.parallel.sequence import find_lse
from wan_core.parallel.weights import shared_checkpoint
from wan_core.parts import Experts
from wan_core.plan import Expert


class LoadedExperts:
    """One or two transformers, loaded with the other ranks and shared with them over a mesh that may change."""

    def __init__(self, spec: Mapping[str, Any], found: Experts, ranks: RankMesh, tokens: int) -> None:
        """spec: precision, keep_blocks, attention, compile and residency, as in `LoadOptions`. tokens: of the largest
        forward that is known of. Raises OptionError or AttentionError."""
        device = ranks.device
        self.compile, self.mesh = spec["compile"], None
        check_compile(self.compile, device)
        precision = precision_of(spec["precision"], found.high, device)
        dtype = compute_dtype(precision, device)
        quantization = find_quantization(precision, device, spec["keep_blocks"])
        self.attention, self.attend = resolve_attention(spec["attention"], device, dtype, found.dit.head_dim)
        parts = {"high": found.high, **({"low": found.low} if found.low else {})}
        weights = sum(part.bytes(dtype, quantization) for part in parts.values())
        policy, why = choose_residency(spec["residency"], device, weights, forward_bytes(found.dit, tokens))
        if ranks.agree(policy == "swap") and policy != "swap":
            policy, why = "swap", "another rank has no room for more"
        self.residency, self.why = Residency(device, policy), why
        share = partial(shared_checkpoint, ranks=ranks) if policy == "resident" else None
        for name, part in parts.items():
            self.residency.add(name, part.load(self.residency.load_device, dtype, quantization, share))

    def arrange(self, ranks: RankMesh) -> None:
        """Share the forwards over this mesh from now on."""
        if self.mesh == ranks.mesh:
            return
        attend_lse = find_lse(self.attention, ranks.mesh)
        for model in self.residency.models.values():
            optimize(
                cast(WanModel, model),
                attend=self.attend,
                compile=self.compile,
                device=self.residency.device,
                ranks=ranks,
                attend_lse=attend_lse,
            )
        self.mesh = ranks.mesh

    @torch.no_grad()
    def acquire(self, expert: Expert) -> WanModel:
        """Ready on the device; where a single transformer runs every step, that."""
        return cast(WanModel, self.residency.use(expert if expert in self.residency.models else "high"))
