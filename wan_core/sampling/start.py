"""What a run begins with: noise, latents with part of the noise, or what another run left behind.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns. Latents of a socket or a file are un-normalised;
the noisy sample x of a run is x = (1 - sigma) * latents + sigma * noise, normalised.

Latents with noise left over travel as ComfyUI's do: x / (1 - sigma), un-normalised. Rounding would make two runs in a
row differ in the last bits from one run, and they lack what a multistep solver keeps, so `Leftover` goes with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wan_core.config import OptionError
from wan_core.models.vae.config import VAEConfig
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.plan import Plan
from wan_core.sampling.solvers import History

NEW = History()


@dataclass(frozen=True)
class Leftover:
    """The end of a run whose noise is left over: its noisy sample, normalised [B, C, T, Y, X], and solver history."""

    x: Tensor
    sigma: float
    solver: str
    history: History = NEW

    def to(self, device: torch.device) -> Leftover:
        """On `device`, without the noise of the last step, which no other run needs."""
        past, start = self.history.x0, self.history.x
        history = History(
            tuple(one.to(device) for one in past),
            None if start is None else start.to(device),
            self.history.order,
        )
        return replace(self, x=self.x.to(device), history=history)


@dataclass(frozen=True, kw_only=True)
class Start:
    """shape: of the latents, [B, C, T, Y, X]. batch_index: which videos of the seed's noise these are. add_noise: a run
    that starts from latents adds noise to them; otherwise it is in them already. leftover: exactly what `latents`
    are rounded from. drawn: shapes of the noise that the seed gave before, for earlier clips of one video."""

    shape: tuple[int, ...]
    seed: int
    batch_index: tuple[int, ...] | None = None
    add_noise: bool = True
    latents: Tensor | None = None
    leftover: Leftover | None = None
    drawn: tuple[tuple[int, ...], ...] = ()

    def check(self, plan: Plan) -> None:
        """Raise OptionError for what cannot be the beginning of `plan`."""
        if not plan.from_latents:
            if not self.add_noise:
                raise OptionError(
                    f"add_noise is disabled, and the run begins at sigma {plan.sigmas[0]:.4g}, where there is nothing "
                    "but noise: enable it, or start at a later step"
                )
            return
        if self.latents is None:
            raise OptionError(
                f"the run begins at sigma {plan.sigmas[0]:.4g} with latents, and they are empty: connect a video "
                "(VAE Encode) or what another sampler left, or start from noise (denoise 1, start step 0)"
            )
        if self.leftover is None:
            return
        if self.add_noise:
            raise OptionError(
                "the latents still have the noise that another sampler left in them: disable add_noise here, or "
                "return_with_leftover_noise there"
            )
        if abs(self.leftover.sigma - plan.sigmas[0]) > 1e-6:
            raise OptionError(
                f"the latents were left at sigma {self.leftover.sigma:.4g}, and this run begins at "
                f"{plan.sigmas[0]:.4g}: use the same steps, shift and solver in both, and start where the other ended"
            )

    def sample(self, plan: Plan, vae: VAEConfig, device: torch.device) -> Tensor:
        """The noisy sample that the run begins with, float32 [B, C, T, Y, X] on `device`."""
        if self.leftover is not None and plan.from_latents:
            return self.leftover.x.to(device, torch.float32)
        noise = draw_noise(self.seed, self.shape, self.batch_index, self.drawn) if self.add_noise else None
        if not plan.from_latents:
            assert noise is not None
            return noise.to(device)
        assert self.latents is not None
        sigma = plan.sigmas[0]
        x = vae.normalise(self.latents.to(device, torch.float32)) * (1 - sigma)
        return x if noise is None else noise.to(device) * sigma + x

    def history(self, plan: Plan, device: torch.device) -> History:
        """What the solver of the run before kept, where this run goes on with it."""
        leftover = self.leftover
        continues = plan.from_latents and leftover is not None and leftover.solver == plan.solver
        return leftover.to(device).history if continues and leftover is not None and plan.before else History()

    def step_noise(self, plan: Plan, device: torch.device) -> Callable[[], Tensor]:
        """Noise for one step of the plan after the other. It depends on the step's place in the whole schedule, so a
        run in two parts sees what one run sees. As ComfyUI draws it on a CPU: from the seed after this one."""
        generator = torch.Generator().manual_seed((self.seed + 1) % 2**64)
        earlier = [shape for shape in self.drawn for _ in (*plan.before, *plan.steps)]
        for shape in (*earlier, *[self.shape] * len(plan.before)):
            torch.randn(shape, generator=generator)
        return lambda: torch.randn(self.shape, generator=generator).to(device)


def finished(x: Tensor, plan: Plan, vae: VAEConfig, known: Tensor | None = None) -> Tensor:
    """The noisy sample at the end of `plan` as un-normalised latents; with noise left over as ComfyUI carries them.

    known: latent frames [1 or B, C, K, Y, X] that have no noise in any step, normalised.
    """
    sigma = plan.sigmas[-1]
    if sigma > 0:
        x = x / (1 - sigma)
        if known is not None:
            x = torch.cat([known.to(x).expand(x.shape[0], -1, -1, -1, -1), x[:, :, known.shape[2] :]], 2)
    return vae.denormalise(x)
