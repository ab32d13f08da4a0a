"""The denoising loop: it walks a plan, and that is all it does.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns.

No value is read back from the device inside the loop. Latents are float32 throughout: they are the state of an ODE that
is integrated over many small steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from wan_core.config import UserError
from wan_core.models.wan.model import WanModel
from wan_core.sampling.cache.residual import residuals
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.guided import ALONE, Branching, Guided, hold_known, host_numbers
from wan_core.sampling.plan import Plan
from wan_core.sampling.solvers import NOISY, SOLVERS, History, Solver
from wan_core.sampling.sparsity.run import sparse_attention
from wan_core.sampling.steps import Expert, LoraShare, Step, split_by_kind

NEW = History()
Given = ParamSpec("Given")
Made = TypeVar("Made")


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

    def acquire(self, expert: Expert, loras: Sequence[LoraShare] = (), /) -> WanModel:
        """The expert, ready to run, its LoRAs at these shares of their strengths (`lora_share`); called once for each
        phase, so that it may load or swap."""
        ...

    def relieve(self, name: str, /) -> bool:
        """Memory ran out with the model `name`: make room, and say whether there is any."""
        ...


class Ready:
    """The `Owner` of models that stay where they are."""

    def __init__(self, find: Callable[[Expert], WanModel]) -> None:
        self.find = find

    def acquire(self, expert: Expert, loras: Sequence[LoraShare] = ()) -> WanModel:
        assert not loras, "nobody changes them here"
        return self.find(expert)

    def relieve(self, name: str) -> bool:
        return False


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

    def skip(self, steps: Sequence[Step]) -> None:
        """Go past steps that an earlier run made."""
        for step in steps:
            if self.step_noise is not None and step.sigma_next > 0:
                self.step_noise()

    def step(self, x: Tensor, velocity: Tensor, step: Step) -> Tensor:
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
    first: int = 0,
    on_step: Callable[[Progress], None] | None = None,
    on_block: Callable[[], None] | None = None,
) -> Tensor:
    """Integrate the flow from `noise` to normalised latents, both float32 [B, C, T, Y, X] on the device of the run.

    noise: the noisy sample at the first step's sigma. Where the plan ends above 0, what is returned is noisy too.
    owner: where memory runs out and it finds some, the step is run again, from the latents of the one before.
    integrator: None is a new one; its history is that of the end then.
    first: index of the step to begin at; `noise` and the integrator's history are those before it then.
    on_step: called after every step; may raise to interrupt.
    on_block: called after every block; may raise to interrupt. With it, the host is only a few blocks ahead of a GPU.
    Raises NonFiniteError within a few steps of the first non-finite latent.
    """
    assert plan.window is None, "`cut_plan` comes before the run"
    integrator, x = integrator or Integrator(plan), hold_known(noise.float(), conditioning)
    integrator.skip(plan.steps[:first])
    timesteps = host_numbers([s.timestep for s in plan.steps], x.device)
    watch = FiniteWatch(len(plan.steps), x.device, branching.together)
    pace = None if on_block is None else Pace(x.device, on_block)
    for whole_phase in plan.phases:
        phase = whole_phase[max(0, first - whole_phase[0].index) :]
        if not phase:
            continue
        expert = phase[0].expert
        attempt = partial(retried, owner, expert)
        model = attempt(owner.acquire, expert, phase[0].loras)
        guided = attempt(Guided, model, conditioning, plan, phase, len(x), branching, pace)
        for run in split_by_kind(phase):
            # Sparse attention orders the tokens around everything else; residuals are kept in that order.
            with sparse_attention(model, plan, run, tuple(x.shape[2:])), residuals(model, run):
                for step in run:
                    attempt(guided.prepare, step)
                    velocity, forwards = attempt(guided.velocity, x, timesteps[step.index], step)
                    x = hold_known(integrator.step(x, velocity, step), conditioning)
                    watch.note(step.index, x)
                    if on_step is not None:
                        on_step(Progress(step, plan, forwards, x, velocity))
        del guided, model  # frees the expert's text state and residuals before the next is made
    watch.finish()
    return x


def retried(owner: Owner, name: str, make: Callable[Given, Made], *given: Given.args, **named: Given.kwargs) -> Made:
    """What `make` returns; once more where memory runs out with the model `name`, and its owner finds some."""
    try:
        return make(*given, **named)
    except torch.cuda.OutOfMemoryError as fault:
        failed = fault
    failed.__traceback__ = None  # it holds the tensors of the failed try
    if not owner.relieve(name):
        raise failed
    return make(*given, **named)


class FiniteWatch:
    """Finds the first non-finite latents without making the host wait: flags travel to pinned memory meanwhile."""

    def __init__(self, steps: int, device: torch.device, together: bool) -> None:
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


BLOCKS_AHEAD = 3  # of A14B at 720p in bf16 they take 0.75 s; enough that the GPU never waits for the host


class BlockChecks:
    """Where a run may be interrupted between two of its blocks. Both methods may raise."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """check: called after every block."""
        self.check = check

    def after_block(self) -> None:
        """The work of a block has been launched."""
        self.check()

    def skip_steps(self, steps: int) -> None:
        """Other ranks have run so many steps before this one begins."""

    def before_exchange(self) -> None:
        """Ranks that split guidance are about to exchange velocities: this one runs no more blocks in this step."""


class Pace:
    """Called after every block. On a GPU, waits until at most `BLOCKS_AHEAD` blocks are queued or running.

    Launching a forward takes the host less than a second, and running it takes a GPU 7 to 9 s (A14B at 720p): without a
    bound, all of a step would be queued when the user interrupts, and no one could stop it."""

    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        """check: called after every block, too; raises to interrupt."""
        self.check = check
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # Blocking: the host sleeps while it waits, and does not take a core from threads that read or copy.
        self.events = [torch.cuda.Event(blocking=True) for _ in range(BLOCKS_AHEAD if self.stream is not None else 0)]
        self.blocks = 0

    def __call__(self) -> None:
        if self.stream is not None:
            event = self.events[self.blocks % BLOCKS_AHEAD]
            if self.blocks >= BLOCKS_AHEAD:
                event.synchronize()  # recorded so many blocks ago
            event.record(self.stream)
            self.blocks += 1
        self.check()
