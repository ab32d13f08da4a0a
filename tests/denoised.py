"""The denoising loop with what tests vary as named arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from wan_core.models.wan.model import WanModel
from wan_core.sampling import denoise as loop
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Integrator
from wan_core.sampling.guided import Branching, RunBranches
from wan_core.sampling.plan import Plan


class Varied:
    """An owner that hands its calls to functions."""

    def __init__(
        self,
        acquire: Callable[[Any], WanModel],
        relieve: Callable[[Any], bool] | None = None,
    ) -> None:
        self.acquire = lambda expert, loras=(): acquire(expert)
        self.relieve = relieve or (lambda _: False)


def denoise(
    plan: Plan,
    acquire: Callable[[Any], WanModel],
    conditioning: Conditioning,
    noise: Tensor,
    *,
    batched: bool = False,
    run_branches: RunBranches | None = None,
    step_noise: Callable[[], Tensor] | None = None,
    relieve: Callable[[Any], bool] | None = None,
    **hooks: Any,
) -> Tensor:
    owner, branching = Varied(acquire, relieve), Branching(batched=batched, run=run_branches)
    integrator = Integrator(plan, step_noise=step_noise)
    return loop.denoise(plan, owner, conditioning, noise, branching=branching, integrator=integrator, **hooks)
