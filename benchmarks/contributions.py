"""Suite `contributions`: what each part of each block does on real trajectories, and what a run loses without it.

Held-out captions on the embedded model, guided. A row leaves out one part of one block of one expert (self-attention,
cross-attention, feed-forward, or all three), the blocks of one step (`forecast`, order 1), or the guidance of one step;
or it moves the boundary between the experts, with every step computed and with the pattern of `--speed balanced`.

share          norm of what the part adds to the tokens over that of what all parts of the block add, mean over steps
latent_psnr    of latents made with the part left out in that expert's whole phase, against the whole model's
psnr, ssim     of the frames
captions_true  share of samples that still show their caption
saved          share of the forwards' arithmetic that leaving it out saves, at 75,600 tokens of A14B's shape; of steps
               and boundaries, share of the forwards

The part is left out exactly: the weights of its last product are zero while the steps of the phase run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.rows import Row
from benchmarks.setups import REFERENCE
from benchmarks.trajectory import BATCH, CaptionTrial
from wan_core.config import OptionError
from wan_core.models.wan.config import T2V_A14B
from wan_core.models.wan.layers import Block
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.models.wan.tasks import find_task
from wan_core.sampling.cache.arguments import parse_setting
from wan_core.sampling.cache.magcache import mark
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.plan import Expert, Plan, make_plan

PARTS = ("self-attention", "cross-attention", "feed-forward")
REAL_TOKENS = 75_600
BOUNDARIES = (0.75, 0.8, 0.85, 0.875, 0.9, 0.925, 0.95)


def contributions_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """The whole run, then a row for every part of every block. Raises OptionError for another model."""
    if name != "tiny":
        raise OptionError(f"model {name!r} given; the suite contributions takes tiny, whose videos mean something")
    tiny = find_task("t2v-tiny")
    plan = make_plan(task=tiny.name, steps=options.steps)
    size = f"{tiny.width}x{tiny.height}x{tiny.frames}"
    trial = PartsTrial(plan, size, options.samples or 16, device, torch.float32)
    details |= {"dtype": "fp32", "solver": plan.solver}
    yield {"name": "whole", "size": size, **trial.run(REFERENCE)}
    for expert in plan.experts:
        steps = sum(step.expert == expert for step in plan.steps) / len(plan.steps)
        layers = len(trial.experts[expert].blocks)
        for layer in range(layers):
            for parts in (*((part,) for part in PARTS), PARTS):
                saved = steps * sum(cost_shares()[part] for part in parts) / layers
                row = trial.without(expert, layer, parts)
                label = "block" if parts == PARTS else parts[0]
                yield {"name": f"{expert}, block {layer}, {label}", "size": size, **row, "saved": round(saved, 4)}
    for label, other in other_plans(plan):
        yield {"name": label, "size": size, **trial.by(other), "saved": round(1 - other.forwards / plan.forwards, 4)}


def other_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """What to call it, and `plan` without the blocks or the guidance of one step, or with another boundary."""
    firsts = {phase[0].index for phase in plan.phases}
    for step in plan.steps:
        if step.index not in firsts:  # the first of a phase has nothing to be forecast from
            skipped = [step.branches if other is step else () for other in plan.steps]
            yield f"step {step.index}, {step.expert}: forecast", mark(plan, skipped, order=1)
        alone = replace(step, guidance=1.0, branches=("cond",))
        steps = tuple(alone if other is step else other for other in plan.steps)
        yield f"step {step.index}, {step.expert}: no guidance", replace(plan, steps=steps)
    preset = parse_setting("speed:balanced")
    for boundary in BOUNDARIES:
        moved = make_plan(task=plan.task, steps=len(plan.steps), boundary=boundary)
        if boundary != plan.boundary:
            yield f"boundary {boundary:g}", moved
        yield f"boundary {boundary:g}, speed:balanced", skip_forwards(moved, preset, None, None)


def cost_shares() -> dict[str, float]:
    """The share of each part in the multiplications of a block of A14B at 720p."""
    dim, ffn = T2V_A14B.dim, T2V_A14B.ffn_dim
    counts = (4 * dim * dim + 2 * REAL_TOKENS * dim, 2 * dim * dim, 2 * dim * ffn)
    return {part: count / sum(counts) for part, count in zip(PARTS, counts, strict=True)}


def last_product(block: Block, part: str) -> nn.Linear:
    found = {"self-attention": block.self_attn.o, "cross-attention": block.cross_attn.o, "feed-forward": block.ffn[2]}
    product = found[part]
    assert isinstance(product, nn.Linear)
    return product


@contextmanager
def left_out(model: WanModel, layer: int, parts: Sequence[str]) -> Iterator[None]:
    """Without these parts of a block inside."""
    block = model.blocks[layer]
    assert isinstance(block, Block)
    weights = [weight for part in parts for weight in last_product(block, part).parameters()]
    kept = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.detach().zero_()
        yield
    finally:
        for weight, before in zip(weights, kept, strict=True):
            weight.detach().copy_(before)


class Norms:
    """The runner that notes how far the tokens are moved by the block with and without a part, once in a step."""

    name: ClassVar[str] = "contributions"
    place: ClassVar[Place] = Place.RESIDUALS

    def __init__(self, model: WanModel, layer: int, parts: Sequence[str]) -> None:
        self.model, self.layer, self.parts = model, layer, parts
        self.shares: list[float] = []

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        tokens = inputs.tokens.clone()
        for layer in range(self.layer):
            tokens = self.model.run_block(layer, tokens, inputs)
        whole = self.model.run_block(self.layer, tokens.clone(), inputs) - tokens
        with left_out(self.model, self.layer, self.parts):
            rest = self.model.run_block(self.layer, tokens.clone(), inputs) - tokens
        self.shares.append(float((whole - rest).norm() / whole.norm()))
        return inner(inputs)


class PartsTrial(CaptionTrial):
    """The captions of the suite `trajectory`, made by models of which something is left out."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.experts: dict[Expert, WanModel] = {name: self.expert(name) for name in self.plan.experts}

    @torch.no_grad()
    def without(self, expert: Expert, layer: int, parts: Sequence[str]) -> Row:
        model = self.experts[expert]
        norms = Norms(model, layer, parts)
        with model.runners.adding(norms):  # of a few captions: they differ little
            self._finish(REFERENCE, self.experts, len(self.scenes) - min(4, len(self.scenes)))
        with left_out(model, layer, parts):
            return {"share": round(sum(norms.shares) / len(norms.shares), 4), **self.by(self.plan)}

    @torch.no_grad()
    def by(self, plan: Plan) -> Row:
        """Videos of another plan, compared with the whole model's by its own."""
        own, self.plan = self.plan, plan
        try:
            starts = range(0, len(self.scenes), BATCH)
            latents = torch.cat([self._finish(REFERENCE, self.experts, start) for start in starts])
        finally:
            self.plan = own
        frames = self._decode(latents)
        assert self.reference is not None
        return {"captions_true": self.true_share(frames), **self._distances(latents, frames, *self.reference)}
