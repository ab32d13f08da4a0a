"""Denoise: a plan walked on models that are ready. The noisy sample in, finished latents out, with a report of every
step.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wan_core.execution.optimize import DelayedScales, begin_run
from wan_core.execution.report import Report, StepClock
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.model import WanModel
from wan_core.parallel.chords import TimeStretch
from wan_core.parallel.conditioning import SplitBranches
from wan_core.parallel.layers import FollowingBranches
from wan_core.parallel.mesh import RankMesh
from wan_core.pipeline.kept_steps import KeptLatents, Reached
from wan_core.pipeline.run import OnStep, Run
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import BlockChecks, Integrator, Owner, Progress, denoise
from wan_core.sampling.guided import Branching
from wan_core.sampling.plan import Plan
from wan_core.sampling.solvers import History
from wan_core.sampling.start import Leftover, Start, finished
from wan_core.sampling.steps import Expert, LoraShare


@torch.no_grad()
def sample(
    run: Run,
    conditioning: Conditioning,
    on_step: OnStep | None = None,
    checks: BlockChecks | None = None,
    latents: Tensor | None = None,
    clip: int = 0,
    kept: KeptLatents | None = None,
    reached: Reached | None = None,
) -> Tensor:
    """Un-normalised latents float32 [1, C, T, Y, X] on the device. latents: that the run starts from. clip: of a long
    video. kept: where latents are kept until they are finished. reached: where an earlier run was."""
    models, plan = run.models, run.job.plan
    start = run.job.start(latents, clip)
    return sample_latents(
        plan,
        run.memory,
        conditioning,
        start.sample(plan, models.vae_config, models.device),
        models.vae_config,
        run.report,
        kept=kept,
        reached=reached,
        start=start,
        on_step=on_step,
        checks=checks,
        ranks=models.ranks,
    )


@torch.no_grad()
def sample_latents(
    plan: Plan,
    owner: Owner,
    conditioning: Conditioning,
    noise: Tensor,
    vae: VAEConfig,
    report: Report,
    *,
    start: Start | None = None,
    on_step: OnStep | None = None,
    on_leftover: Callable[[Leftover], None] = lambda _: None,
    checks: BlockChecks | None = None,
    ranks: RankMesh | None = None,
    kept: KeptLatents | None = None,
    reached: Reached | None = None,
) -> Tensor:
    """Walk `plan` from `noise` [B, C, T, Y, X], the noisy sample at its first sigma, to un-normalised latents of the
    same shape, float32, timing every step.

    start: what `noise` was made of, for solvers that need more than that. ranks: those that run this together. vae: of
    the VAE whose latents these are. on_step and checks may raise to interrupt. on_leftover: told what another run can
    go on with, where noise is left over. kept: of the first rank, keeps the latents of steps until all are made; ranks
    that run different steps keep none. reached: where an earlier run was, on all ranks.
    """
    checks = checks or BlockChecks()
    clock, forwards = StepClock(report), 0
    timed = Timed(owner, clock)

    def note(progress: Progress) -> None:
        nonlocal forwards
        forwards += progress.forwards
        clock.step(progress.step.expert, progress.forwards, progress.step.cost)
        if kept is not None and stretch is None:
            assert progress.latents is not None
            kept.keep(plan, Reached(progress.step.index + 1, progress.latents, integrator.history), timed.scales)
        if on_step is not None:
            on_step(progress, clock.seconds_per_forward())

    stretch = TimeStretch(plan, ranks) if ranks is not None and ranks.time.size > 1 else None
    if stretch is not None:
        report.notes.append(f"time: {stretch.stretches.forwards} forwards in a row instead of {len(plan.steps)}")
        checks.skip_steps(stretch.group.index)
        noise = stretch.begin(noise)
    walked, solver = (plan, None) if stretch is None else (stretch.plan, stretch.solver)
    if reached is not None:
        noise = reached.x
        report.notes.append(f"an earlier run made the first {reached.index} of {len(plan.steps)} steps")
    history = History() if start is None else start.history(plan, noise.device)
    step_noise = None if start is None else start.step_noise(plan, noise.device)
    integrator = Integrator(walked, history if reached is None else reached.history, step_noise, solver)
    x = denoise(
        walked,
        timed,
        conditioning,
        noise,
        branching=branching_over(ranks, checks, plan.batched),
        integrator=integrator,
        first=0 if reached is None else reached.index,
        on_step=note,
        on_block=checks.after_block,
    )
    x = x if stretch is None else stretch.finish(x)
    clock.finish()
    if plan.unskipped is not None:
        report.notes.append(
            f"forwards: {forwards} of {plan.unskipped} ({100 * (1 - forwards / plan.unskipped):.0f} % saved)"
        )
    report.notes += [note for note in plan.notes if note not in report.notes]  # clips have the same
    if plan.sigmas[-1] > 0:
        on_leftover(Leftover(x, plan.sigmas[-1], plan.solver, integrator.history._replace(noise=None)))
    return finished(x, plan, vae, conditioning.known)


class Timed:
    """`owner`, which begins a run of an expert when it is acquired, clean of the run before, and times its steps.
    scales: whether the expert takes some from one forward to the next (delayed FP8)."""

    def __init__(self, owner: Owner, clock: StepClock) -> None:
        self.owner, self.clock, self.scales = owner, clock, False
        self.relieve = owner.relieve

    def acquire(self, expert: Expert, loras: Sequence[LoraShare] = ()) -> WanModel:
        model = self.owner.acquire(expert, loras)
        begin_run(model)
        self.scales = model.runners.find(DelayedScales) is not None
        self.clock.begin()
        return model


def branching_over(ranks: RankMesh | None, checks: BlockChecks, batched: bool) -> Branching:
    """How ranks run the guidance branches of a step: each runs both, or shares each forward, but where branches have
    ranks of their own or go through the layers of several."""
    if ranks is None:
        return Branching(batched=batched)
    branching = Branching(batched=batched, together=True)
    if ranks.cfg.size == 2:
        split = SplitBranches(ranks, checks.before_exchange)
        return replace(branching, run=split, mine=split.mine)
    return replace(branching, run=FollowingBranches(ranks)) if ranks.layers.size > 1 else branching
