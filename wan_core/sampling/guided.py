"""One expert in its phase: the forwards of each guidance branch, and the guided velocity of them.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, S text rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config import NagOptions
from wan_core.models.wan.families import family_of
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.models.wan.runners import ForwardInfo
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Branch, Step

# One forward of both branches pays while a single one cannot fill the device. Measured on an H200 with A14B:
# benchmarks/results/archive/guidance-*.json and docs/performance.md.
BATCHED_TOKENS = 1024
TRANSFER_TOKENS = 8192  # up to here a block's copy from the host takes longer than computing it once
BOTH: tuple[Branch, ...] = ("cond", "uncond")

RunBranches = Callable[[Sequence[Branch], Callable[[Branch], Tensor], tuple[int, ...]], dict[Branch, Tensor]]
"""(branches, forward of a branch, shape of a velocity) -> the velocity of every branch, float32."""


@dataclass(frozen=True, kw_only=True)
class Branching:
    """How the guidance branches of a step run. batched: both as one forward (see `choose_batched`). run: splits them
    over ranks; None: here, one after the other or batched. mine: the branch of this rank where each has ranks of its
    own. together: several ranks run the loop with the same arguments, and all return the same latents."""

    batched: bool = False
    run: RunBranches | None = None
    mine: Branch | None = None
    together: bool = False


ALONE = Branching()


class Prompts(NamedTuple):
    """A text of the prompt and one of the negative prompt, prepared: for both branches as one forward (None where their
    texts cannot be a batch), for each alone, and for steps with normalized attention guidance."""

    both: PreparedText | None
    each: dict[Branch, PreparedText]
    nag: PreparedText | None

    def of(self, branch: Branch, nag: bool) -> PreparedText:
        text = self.nag if nag else self.each[branch]
        assert text is not None
        return text


class Guided:
    """One expert in its phase, with its prompts prepared: turns latents into a guided velocity."""

    def __init__(
        self,
        model: WanModel,
        conditioning: Conditioning,
        plan: Plan,
        phase: tuple[Step, ...],
        batch: int,
        branching: Branching,
        after_block: Callable[[], None] | None,
    ) -> None:
        self.model = model
        self.after_block = after_block
        self.conditioning = conditioning
        self.run_branches, self.mine = branching.run, branching.mine
        self.batched = branching.batched and branching.run is None
        assert not (self.batched and self.conditioning.separate), "`choose_batched` knows"
        self.batch = batch
        run = [step for step in phase if len(step.skipped) < len(step.branches)]
        following = plan.steps[phase[-1].index + 1 :][:1]
        changes = any(step.expert != phase[-1].expert for step in following) and run and not run[-1].also
        self.last = run[-1].index if changes else None  # the step whose last forward is the expert's
        both = any("uncond" in step.branches or step.nag for step in phase)
        self.named: tuple[Branch, ...] = BOTH if both else ("cond",)
        device, nag = next(iter(model.parameters())).device, plan.nag
        self.nag_numbers = None if nag is None else nag_numbers(nag, device)
        self.driving_inputs = family_of(model.config).driving_inputs
        self.prompts: Prompts | None = None
        self.prepared: tuple[tuple[int, int], bool] | None = None  # which texts `prompts` are of, and whether undriven
        self.passes = 0  # forwards over driving videos since the last step
        self.prepare(phase[0])

    def prepare(self, step: Step) -> None:
        """Prepare the texts of a step and what drives its video, unless they are: once for a phase, and again where a
        text changes or the driving video is read or not."""
        if self.prepared == (step.texts, step.undriven):
            return
        self.prompts = self.prepared = None  # keys and values of all blocks: make room for the next
        self.prompts = self.prepare_prompts(step.texts, step.undriven)
        self.prepared = step.texts, step.undriven

    def prepare_prompts(self, texts: tuple[int, int], undriven: bool) -> Prompts:
        """A text of each branch, by their numbers."""
        numbers = dict(zip(self.named, texts, strict=False))
        each: dict[Branch, PreparedText] = {}
        both = None
        if self.conditioning.separate:
            for branch in self.named:
                each[branch] = self.prepare_branches((branch,), numbers, undriven)
        else:
            both = self.prepare_branches(self.named, numbers, undriven)
            for number, branch in enumerate(self.named):
                each[branch] = both.rows(number * self.batch, (number + 1) * self.batch)
        if "uncond" in each:
            each["uncond"] = each["uncond"]._replace(bias=None)
        nag = None
        if self.nag_numbers is not None and "uncond" in each:
            nag = each["cond"].with_negative(each["uncond"], self.nag_numbers)
        return Prompts(both, each, nag)

    def prepare_branches(
        self, branches: tuple[Branch, ...], numbers: Mapping[Branch, int], undriven: bool
    ) -> PreparedText:
        """The texts of `branches` by number, one branch after the other along the batch."""
        rows = [self.conditioning.text(branch, numbers[branch]) for branch in branches]
        features = self.conditioning.image_features  # [1 or B, N, D]; both branches see the image
        if features is not None:
            features = features.expand(self.batch, -1, -1).repeat(len(rows), 1, 1)
        own = self.conditioning.family_inputs(branches, self.batch)
        if undriven:
            own = {name: value for name, value in own.items() if name not in self.driving_inputs}
        prepared = self.model.prepare_text(stack_text(rows, self.batch), features, **own)
        self.passes += prepared.passes and max(1, prepared.passes // self.batch)
        return prepared._replace(bias=self.bias(branches, numbers["cond"], max(one.shape[1] for one in rows)))

    def bias(self, branches: tuple[Branch, ...], number: int, rows: int) -> Tensor | None:
        """[branches * B, T, S]: what frames add to the scores of the S text rows of the branches, of which the texts
        have `rows`; nothing to those of the negative prompt."""
        penalty = self.conditioning.penalty
        if penalty is None:
            return None
        weight = self.model.patch_embedding.weight
        bias = F.pad(-penalty[number], (0, self.model.config.text_rows(rows) - penalty.shape[2])).to(weight)
        each = [bias if branch == "cond" else torch.zeros_like(bias) for branch in branches]
        return torch.stack([one for one in each for _ in range(self.batch)])

    def velocity(self, x: Tensor, timestep: Tensor, step: Step) -> tuple[Tensor, int]:
        """float32 [B, C, T, Y, X], and how many forwards of a video ran, with those that `prepare` took; guidance
        arithmetic in float32, because it amplifies a difference."""
        inputs, time = model_inputs(x, timestep, self.conditioning)
        skipped = step.skipped
        velocities: list[Tensor] = []
        for one in step.conditions:
            self.prepare(one)
            predictions = self.branches(inputs, time, one, skipped)
            velocities.append(self.guide(predictions, one))
        velocity = torch.stack(velocities).mean(0) if step.also else velocities[0]
        passes, self.passes = self.passes, 0
        return velocity, (len(step.branches) - len(skipped)) * step.runs + passes

    def guide(self, velocities: dict[Branch, Tensor], step: Step) -> Tensor:
        """The guided velocity, of the velocity of each branch."""
        cond = velocities["cond"]
        if "uncond" not in velocities:
            return cond
        return velocities["uncond"] + step.guidance * (cond - velocities["uncond"])

    def branches(
        self,
        inputs: Tensor,
        time: Tensor,
        step: Step,
        skipped: tuple[Branch, ...],
    ) -> dict[Branch, Tensor]:
        """The velocity of each branch that the step has."""
        prompts = self.prompts
        assert prompts is not None

        running = [branch for branch in step.branches if branch not in skipped]

        def info(branches: tuple[Branch, ...], skip: bool) -> ForwardInfo:
            last = step.index == self.last and branches[-1] in running[-1:]
            return ForwardInfo(step.index, branches, skip, step.sparsity, self.after_block, step.control, last)

        def forward(branch: Branch) -> Tensor:
            return self.model(inputs, time, prompts.of(branch, step.nag), info((branch,), branch in skipped))

        if self.run_branches is not None:
            config = self.model.config
            shape = inputs.shape[0], config.out_channels, *inputs.shape[2:]
            return self.run_branches(step.branches, forward, shape)
        if len(step.branches) == 2 and self.batched and skipped in ((), step.branches):
            assert prompts.both is not None
            run = info(step.branches, bool(skipped))
            both = self.model(torch.cat([inputs, inputs]), torch.cat([time, time]), prompts.both, run)
            return dict(zip(step.branches, both.chunk(2), strict=True))
        return {branch: forward(branch) for branch in step.branches}


def host_numbers(values: list[float], device: torch.device) -> Tensor:
    """float32 on the device without waiting for it. Never bf16, which would make a timestep of 999 a 1000."""
    host = torch.tensor(values, dtype=torch.float32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def nag_numbers(nag: NagOptions, device: torch.device) -> Tensor:
    """The numbers of NAG as the tensor that `PreparedText` takes."""
    return host_numbers([nag.scale, nag.tau, nag.alpha], device)


def stack_text(rows: list[Tensor], batch: int) -> Tensor:
    """Text rows [1 or B, S_i, D] of the branches -> [branches * B, max S, D], padded with zeros as the model does."""
    longest = max(r.shape[1] for r in rows)
    return torch.cat([F.pad(r, (0, 0, 0, longest - r.shape[1])).expand(batch, -1, -1) for r in rows])


def model_inputs(x: Tensor, timestep: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor]:
    """The transformer's input [B, C_in, T, Y, X] and its timesteps: [B], or [B, T] with known first latent frames."""
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


def choose_batched(mode: str, plan: Plan, tokens: int, streamed: bool, separate: bool = False) -> tuple[bool, str]:
    """Whether to run both guidance branches as one forward, and why, in words for the report.

    mode: "sequential", "batched" or "auto". tokens: of one video. streamed: weights come from host memory for every
    forward. separate: of the conditioning.
    """
    if not plan.guided:
        return False, "no step is guided"
    if separate:
        return False, "the prompt and the negative prompt have different numbers of text rows"
    if mode != "auto":
        return mode == "batched", "asked for"
    if streamed and tokens <= TRANSFER_TOKENS:
        return True, "weights are streamed: one transfer serves both branches"
    if tokens <= BATCHED_TOKENS:
        return True, f"{tokens} tokens do not fill the device alone (up to {BATCHED_TOKENS})"
    return False, f"{tokens} tokens fill the device: batching would only cost memory"
