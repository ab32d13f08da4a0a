"""The denoising loop: it walks a plan, and that is all it does.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, S text rows.

No value is read back from the device inside the loop (but by an adaptive policy, which has its own way of not waiting:
`wan_core.sampling.cache.policies`). Latents are float32 throughout: they are the state of an ODE
that is integrated over many small steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config import NagOptions, UserError
from wan_core.models.wan.families import family_of
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.models.wan.runners import ForwardInfo
from wan_core.sampling.cache.adaptive_run import Adaptive
from wan_core.sampling.cache.residual import residuals
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.pace import Pace
from wan_core.sampling.plan import Branch, Expert, Plan, Step
from wan_core.sampling.resolution import Resolution
from wan_core.sampling.solvers import NOISY, SOLVERS, History, Solver
from wan_core.sampling.sparsity.run import sparse_attention
from wan_core.sampling.stages import runs
from wan_core.sampling.windowed import in_windows

# One forward of both branches pays while a single one cannot fill the device. Measured on an H200 with A14B:
# benchmarks/results/guidance-*.json and docs/performance.md.
BATCHED_TOKENS = 1024
TRANSFER_TOKENS = 8192  # up to here a block's copy from the host takes longer than computing it once


BOTH: tuple[Branch, ...] = ("cond", "uncond")
NEW = History()
Made = TypeVar("Made")

RunBranches = Callable[[Sequence[Branch], Callable[[Branch], Tensor], tuple[int, ...]], dict[Branch, Tensor]]
"""(branches, forward of a branch, shape of a velocity) -> the velocity of every branch, float32."""


class NonFiniteError(UserError):
    """The latents became NaN or infinite; the message says at which step and what usually helps."""


@dataclass(frozen=True)
class Progress:
    """Handed to `on_step` after a step was launched (on a GPU it may still be running, or it ran in workers)."""

    step: Step
    plan: Plan
    forwards: int  # runs of all blocks in this step, and over a driving video before it
    latents: Tensor | None = None  # normalised, at step.sigma_next; of workers what `preview` returns, if they send it
    velocity: Tensor | None = None  # predicted at step.sigma; None: it ran in workers
    clip: tuple[int, int] = (1, 1)  # of a long video: which one, from 1, of how many
    later: float = 0.0  # later clips take so many forwards of this one

    @property
    def total(self) -> int:
        return len(self.plan.steps)

    def left(self, seconds: float) -> float:
        """Seconds that the rest of the run takes after this step, including later clips, see `Plan.left`."""
        return self.plan.left(self.step, seconds) + seconds * self.later

    def preview(self) -> Tensor:
        """The video the model sees behind the remaining noise: normalised latents [B, C, T, Y, X]."""
        assert self.latents is not None
        return self.latents if self.velocity is None else self.latents - self.velocity * self.step.sigma_next


class Owner(Protocol):
    """Who holds the models of a run, and decides what is on the device."""

    def acquire(self, expert: Expert, /) -> WanModel:
        """The expert, ready to run; called once for each phase, so that it may load or swap."""
        ...

    def prefetch(self, expert: Expert, following: Expert, runs: int, /) -> None:
        """The next `runs` runs of the blocks of `expert` are the last before `following` is acquired."""
        ...

    def relieve(self, name: str, /) -> bool:
        """Memory ran out with the model `name`: make room, and say whether there is any."""
        ...


class Ready:
    """The `Owner` of models that stay where they are."""

    def __init__(self, acquire: Callable[[Expert], WanModel]) -> None:
        self.acquire = acquire

    def prefetch(self, expert: Expert, following: Expert, runs: int) -> None:
        pass

    def relieve(self, name: str) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Branching:
    """How the guidance branches of a step run. batched: both as one forward (see `choose_batched`). run: splits them
    over ranks; None: here, one after the other or batched. together: several ranks run the loop with the same
    arguments, and all return the same latents."""

    batched: bool = False
    run: RunBranches | None = None
    together: bool = False


ALONE = Branching()


class Integrator:
    """The solver of a run, with what it keeps between steps. history: from the run that this one goes on with.
    step_noise: draws the noise of one step after the other, for solvers that add some. solver: in the place of the
    plan's (ranks that run different steps)."""

    def __init__(
        self,
        plan: Plan,
        history: History = NEW,
        step_noise: Callable[[], Tensor] | None = None,
        solver: Solver | None = None,
    ) -> None:
        noisy = plan.solver in NOISY
        if noisy and step_noise is None and len(plan.steps) > 1:
            raise ValueError(f"solver {plan.solver} adds noise: hand in step_noise")
        self.solver, self.history = solver or SOLVERS[plan.solver], history
        self.step_noise = step_noise if noisy else None
        self.sigmas, self.past = (*plan.before, *plan.sigmas), len(plan.before)

    def step(self, x: Tensor, velocity: Tensor, step: Step) -> Tensor:
        """The latents at `step.sigma_next`."""
        if self.step_noise is not None and step.sigma_next > 0:
            self.history = self.history._replace(noise=self.step_noise())
        x, self.history = self.solver(x, velocity, self.past + step.index, self.sigmas, self.history)
        return x


def denoise(
    plan: Plan,
    owner: Owner,
    conditioning: Conditioning,
    noise: Tensor,
    *,
    branching: Branching = ALONE,
    integrator: Integrator | None = None,
    on_step: Callable[[Progress], None] | None = None,
    on_block: Callable[[], None] | None = None,
) -> Tensor:
    """Integrate the flow from `noise` to normalised latents, both float32 [B, C, T, Y, X] on the device of the run.

    noise: the noisy sample at the first step's sigma. Where the plan ends above 0, what is returned is noisy too.
    owner: where memory runs out and it finds some, the step is run again, from the latents of the one before.
    integrator: None is a new one; its history is that of the end then.
    on_step: called after every step; may raise to interrupt.
    on_block: called after every block; may raise to interrupt. With it, the host is only a few blocks ahead of a GPU.
    Raises NonFiniteError within a few steps of the first non-finite latent.
    """
    assert plan.window is None, "`cut_plan` comes before the run"
    integrator, x = integrator or Integrator(plan), hold_known(noise.float(), conditioning)
    timesteps = host_numbers([s.timestep for s in plan.steps], x.device)
    watch = FiniteWatch(len(plan.steps), x.device, branching.together)
    resolution = Resolution(plan, conditioning, integrator.history.video)
    pace = None if on_block is None else Pace(x.device, on_block)
    for phase, following in zip(plan.phases, (*plan.phases[1:], None), strict=True):
        expert = phase[0].expert
        relieve = partial(owner.relieve, expert)
        last = last_runs(phase, branching.batched or branching.run is not None)  # each rank runs one branch
        model = retried(partial(owner.acquire, expert), relieve)
        guided = retried(partial(Guided, model, resolution, plan, phase, len(x), branching, pace), relieve)
        for run in runs(phase):
            # Sparse attention orders the tokens around everything else; residuals are kept in that order.
            with sparse_attention(model, plan, run, tuple(x.shape[2:])), residuals(model, run):
                for step in run:
                    retried(partial(guided.prepare, step), relieve)
                    if following is not None and step.index == last[0]:
                        owner.prefetch(expert, following[0].expert, last[1])
                    velocity, forwards = retried(partial(guided.velocity, x, timesteps[step.index], step), relieve)
                    x = hold_known(integrator.step(x, velocity, step), conditioning)
                    watch.note(step.index, x)
                    if on_step is not None:
                        on_step(Progress(step, plan, forwards, x, velocity))
        del guided, model  # frees the expert's text state and residuals before the next is made
    watch.finish()
    integrator.history = integrator.history._replace(video=resolution.video)
    return x


def retried(make: Callable[[], Made], relieve: Callable[[], bool]) -> Made:
    """What `make` returns; once more where memory runs out and `relieve` finds some."""
    try:
        return make()
    except torch.cuda.OutOfMemoryError as fault:
        failed = fault
    failed.__traceback__ = None  # it holds the tensors of the failed try
    if not relieve():
        raise failed
    return make()


def last_runs(phase: tuple[Step, ...], batched: bool) -> tuple[int, int]:
    """The last step of a phase in which blocks run, as far as the plan knows, and how often they run in it."""
    for step in reversed(phase):
        skipped = () if step.action == "adaptive" else step.skipped
        together = len(step.branches) == 2 and batched and skipped in ((), step.branches)
        branches = len(step.branches) - len(skipped)
        if branches:
            return step.index, step.runs * (1 if together else branches)
    return -1, 0


def host_numbers(values: list[float], device: torch.device) -> Tensor:
    """float32 on the device without waiting for it. Never bf16, which would make a timestep of 999 a 1000."""
    host = torch.tensor(values, dtype=torch.float32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def nag_numbers(nag: NagOptions, device: torch.device) -> Tensor:
    """The numbers of NAG as the tensor that `PreparedText` takes."""
    return host_numbers([nag.scale, nag.tau, nag.alpha], device)


class Guided:
    """One expert in its phase, with its prompts prepared: turns latents into a guided velocity."""

    def __init__(
        self,
        model: WanModel,
        resolution: Resolution,
        plan: Plan,
        phase: tuple[Step, ...],
        batch: int,
        branching: Branching,
        after_block: Callable[[], None] | None,
    ) -> None:
        self.model = model
        self.after_block = after_block
        self.resolution, self.conditioning = resolution, resolution.conditioning
        self.run_branches = branching.run
        self.batched = branching.batched and branching.run is None
        self.windows = plan.context_windows
        self.delta: Tensor | None = None  # cond - uncond of the last step that ran both
        self.batch = batch
        both = any("uncond" in step.branches or step.nag for step in phase)
        self.named: tuple[Branch, ...] = BOTH if both else ("cond",)
        device, nag = next(iter(model.parameters())).device, plan.nag
        self.nag_numbers = None if nag is None else nag_numbers(nag, device)
        self.driving_inputs = family_of(model.config).driving_inputs
        self.prepared: tuple[tuple[int, int], bool] | None = None
        self.passes = 0  # forwards over driving videos since the last step
        self.prepare(phase[0])
        self.adaptive = None
        if plan.adaptive is not None and any(step.action == "adaptive" for step in phase):
            self.adaptive = Adaptive(plan.adaptive, len(plan.steps), self.both.keys_values[0][0].device)

    def prepare(self, step: Step) -> None:
        """Prepare the texts of a step and what drives its video, unless they are: once for a phase, and again where a
        text changes or the driving video is read or not."""
        if self.prepared == (step.texts, step.undriven):
            return
        if self.prepared is not None:
            del self.both, self.text, self.nag_text  # keys and values of all blocks: make room for the next
            self.prepared = None
        texts = zip(self.named, step.texts, strict=False)
        rows = [self.conditioning.text(branch, number) for branch, number in texts]
        features = self.conditioning.image_features  # [1 or B, N, D]; both branches see the image
        if features is not None:
            features = features.expand(self.batch, -1, -1).repeat(len(rows), 1, 1)
        # cond before uncond along the batch
        own = self.conditioning.family_inputs(self.named, self.batch)
        if step.undriven:
            own = {name: value for name, value in own.items() if name not in self.driving_inputs}
        self.both = self.model.prepare_text(stack_text(rows, self.batch), features, **own)
        self.text = {"cond": self.both.rows(0, self.batch), "uncond": self.both.rows(self.batch, 2 * self.batch)}
        self.nag_text = None
        if self.nag_numbers is not None and len(rows) == 2:
            self.nag_text = self.text["cond"].with_negative(self.text["uncond"], self.nag_numbers)
        self.passes += self.both.passes and max(1, self.both.passes // self.batch)
        self.prepared = step.texts, step.undriven

    def velocity(self, x: Tensor, timestep: Tensor, step: Step) -> tuple[Tensor, int]:
        """float32 [B, C, T, Y, X], and how many forwards of a video ran, with those that `prepare` took; guidance
        arithmetic in float32, because it amplifies a difference."""
        size, conditioning = self.resolution.of(step, x, self.model.config.patch_size[1:])
        seen = x if size is None else hold_known(size.sample(x, step.sigma), conditioning)
        inputs, time = model_inputs(seen, timestep, conditioning)
        skipped = step.skipped
        if self.adaptive is not None and not self.adaptive.decide(step):
            skipped = ()
        spacing = (1.0, 1.0) if size is None or step.own_positions else size.spacing
        predictions = self.branches(inputs, time, step, skipped, spacing)
        velocity = self.resolution.whole(x, seen, self.guide(predictions, step), step, size)
        if self.adaptive is not None and not skipped:  # last: a step in which memory runs out is noted once
            self.adaptive.note(step, predictions["cond"])
        passes, self.passes = self.passes, 0
        return velocity, (len(predictions) - len(skipped)) * step.runs + passes

    def guide(self, found: dict[Branch, Tensor], step: Step) -> Tensor:
        """The guided velocity, of the velocity of each branch."""
        cond = found["cond"]
        if step.delta:
            assert self.delta is not None, "the first guided step of a phase runs both branches"
            return cond + (step.guidance - 1) * self.delta
        if "uncond" not in found:
            return cond
        self.delta = cond - found["uncond"]
        return found["uncond"] + step.guidance * self.delta

    def branches(
        self,
        inputs: Tensor,
        time: Tensor,
        step: Step,
        skipped: tuple[Branch, ...],
        spacing: tuple[float, float],
    ) -> dict[Branch, Tensor]:
        """The velocity of each branch that the step has. spacing: of rows and columns (`ForwardInfo`)."""

        def info(branches: tuple[Branch, ...], skip: bool) -> ForwardInfo:
            return ForwardInfo(step.index, branches, skip, step.sparsity, self.after_block, spacing, step.control)

        def forward(branch: Branch) -> Tensor:
            text = self.nag_text if step.nag else self.text[branch]
            assert text is not None
            return self.predict(inputs, time, text, step, info((branch,), branch in skipped))

        if self.run_branches is not None:
            config = self.model.config
            return self.run_branches(step.branches, forward, (inputs.shape[0], config.out_channels, *inputs.shape[2:]))
        if len(step.branches) == 2 and self.batched and skipped in ((), step.branches):
            run = info(step.branches, bool(skipped))
            both = self.predict(torch.cat([inputs, inputs]), torch.cat([time, time]), self.both, step, run)
            return dict(zip(step.branches, both.chunk(2), strict=True))
        return {branch: forward(branch) for branch in step.branches}

    def predict(self, inputs: Tensor, time: Tensor, text: PreparedText, step: Step, info: ForwardInfo) -> Tensor:
        """The velocity float32 [B, C, T, Y, X] of `inputs`: one forward, or one for each context window."""
        if self.windows is None or not step.windows:
            return self.model(inputs, time, text, info)

        def forward(some: Tensor, some_time: Tensor, window: int) -> Tensor:
            return self.model(some, some_time, text, replace(info, window=window))

        return in_windows(forward, inputs, time, step, self.windows, self.model.config.out_channels)


def stack_text(rows: list[Tensor], batch: int) -> Tensor:
    """Text rows [1 or B, S_i, D] of the branches -> [branches * B, max S, D]; zero rows at the end, as the model
    itself pads."""
    longest = max(r.shape[1] for r in rows)
    return torch.cat([F.pad(r, (0, 0, 0, longest - r.shape[1])).expand(batch, -1, -1) for r in rows])


def model_inputs(x: Tensor, timestep: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor]:
    """The transformer's input [B, C_in, T, Y, X] and its timesteps: [B], or [B, T] where the first latent frames are
    known."""
    B, _, T = x.shape[:3]
    if conditioning.concat is not None:
        x = torch.cat([x, conditioning.concat.to(x).expand(B, -1, -1, -1, -1)], dim=1)
    if conditioning.known is None:
        return x, timestep.expand(B)
    frames = timestep.repeat(B, T)
    frames[:, : conditioning.known.shape[2]] = 0
    return x, frames


def hold_known(x: Tensor, conditioning: Conditioning) -> Tensor:
    """Put the known first latent frames back (TI2V): the model is told that they are free of noise."""
    clean = conditioning.known
    if clean is None:
        return x
    return torch.cat([clean.to(x).expand(x.shape[0], -1, -1, -1, -1), x[:, :, clean.shape[2] :]], dim=2)


def choose_batched(mode: str, plan: Plan, tokens: int, streamed: bool) -> tuple[bool, str]:
    """Whether to run both guidance branches as one forward, and why, in words for the report.

    mode: "sequential", "batched" or "auto". tokens: of one video. streamed: weights come from host memory for every
    forward.
    """
    if not plan.guided:
        return False, "no step is guided"
    if mode != "auto":
        return mode == "batched", "asked for"
    if streamed and tokens <= TRANSFER_TOKENS:
        return True, "weights are streamed: one transfer serves both branches"
    if tokens <= BATCHED_TOKENS:
        return True, f"{tokens} tokens do not fill the device alone (up to {BATCHED_TOKENS})"
    return False, f"{tokens} tokens fill the device: batching would only cost memory"


class FiniteWatch:
    """Finds the first non-finite latents without making the host wait: flags travel to pinned memory on their own
    time."""

    def __init__(self, steps: int, device: torch.device, together: bool = False) -> None:
        """together: several ranks watch the same latents and must stop at the same step, or some would wait for the
        others. They look at flags two steps old, which are there."""
        self.finite = torch.ones(steps, dtype=torch.bool, pin_memory=device.type == "cuda")
        self.device = device
        self.together = together
        self.events: list[torch.cuda.Event] = []

    def note(self, index: int, x: Tensor) -> None:
        """Queue the check of step `index`, and raise if an earlier one is known to have failed."""
        self.finite[index].copy_(x.isfinite().all(), non_blocking=True)
        if not self.together or self.device.type != "cuda":
            self.check(index)
            return
        self.events.append(torch.cuda.Event())
        self.events[-1].record(torch.cuda.current_stream(self.device))
        if len(self.events) > 2:
            self.events.pop(0).synchronize()
            self.check(index - 2)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check(len(self.finite))

    def check(self, until: int) -> None:
        flags = self.finite[: until + 1].tolist()
        if not all(flags):
            raise NonFiniteError(
                f"the latents became NaN or infinite at step {flags.index(False)}: stopped, or a black video would "
                "follow. Use bf16 or fp32 (fp16 overflows), another attention backend, or check that the files are "
                "whole."
            )
