"""Ranks agree whether to stop: all of them equally often in every step, whatever a rank has to run in it.

An agreement takes all ranks, so one that asked once more than another would wait for ever. Ranks themselves are in
tests/parallel/test_parallel_time.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.denoised import denoise
from wan_core.cli import build_parser
from wan_core.cli.inform import asked_plan
from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs
from wan_core.parallel import conditioning
from wan_core.parallel.chords import check_chords, stretch_plan
from wan_core.parallel.conditioning import SplitBranches
from wan_core.parallel.layers import check_layers
from wan_core.parallel.mesh import Mesh
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.plan import Plan
from wan_core.workers.rank import BetweenBlocks, agreements

# Once, one rank asked 22 times in this run, and the other 16.
REPORTED = "--guidance /1 --sparse 0.7 --solver unipc --shift 12 --steps 4"
# Each draw takes one of a row.
CHOICES = (
    ("--steps 4", "--steps 12", "--steps 11 --shift 12"),
    ("", "--guidance /1", "--guidance 1", "--guidance /1 --nag 11"),
    (
        "",
        "",
        "--taylorseer 2/0.1",
        "--magcache 0.24/2/0.1",
    ),
    ("--solver unipc", "--solver euler", "--solver heun", "--solver dpm++"),
    ("", "--sparse 0.7"),
    ("", "--start-step 2 --end-step 4"),
)
MESHES = ("1x2x2", "2x1x1", "layers2", "time2", "time4+2x1x1")
PARSER = build_parser()
SIZE = (1, 16, 5, 4, 6)  # 17 frames
BLOCKS = 6  # no multiple of the blocks between two agreements
NOISE = draw_noise(7, SIZE)
TEXT = Conditioning(cond=draw_noise(1, (1, 5, 12)), uncond=draw_noise(2, (1, 2, 12)))


class Idle(WanModel):
    """Its blocks compute nothing: they are counted."""

    def run_block(self, layer: int, tokens: Tensor, inputs: BlockInputs, own: object | None = None) -> Tensor:
        return tokens


@pytest.fixture(scope="module")
def model() -> WanModel:
    torch.manual_seed(0)
    config = DiTConfig(
        in_channels=16, out_channels=16, dim=32, ffn_dim=48, num_heads=2, num_layers=BLOCKS, text_dim=12, text_len=8
    )
    return Idle(config).eval().requires_grad_(False)


def planned(arguments: str) -> Plan:
    """What is sparse does not matter here: it changes no number of blocks."""
    options = PARSER.parse_args(["plan", "--task", "t2v-A14B", "--frames", "17", *arguments.split()])
    plan = asked_plan(options)
    return replace(plan, sparse=None, steps=tuple(replace(step, sparsity=0.0) for step in plan.steps))


def drawn_plans(count: int) -> list[tuple[str, Plan]]:
    """Draws of options that go together."""
    plans, draw = [(REPORTED, planned(REPORTED))], random.Random(11)
    while len(plans) < count:
        arguments = " ".join(draw.choice(row) for row in CHOICES)
        try:
            plans.append((arguments, planned(arguments)))
        except OptionError:
            continue
    return plans


class Counting:
    """In the place of a `Rank`: the agreements of each step."""

    def __init__(self) -> None:
        self.steps = [0]

    def raise_if_interrupted(self) -> None:
        self.steps[-1] += 1


def gathered(out: Tensor, own: Tensor, group: Any) -> None:
    out.copy_(torch.cat([own, own]))


def questions(model: WanModel, plan: Plan, mesh: Mesh, split: int | None, batched: bool) -> list[int]:
    """How often a rank asks in each step. split: its place among ranks that split guidance; None: they do not. What the
    other ranks would send does not matter."""
    rank = Counting()
    between = BetweenBlocks(rank, agreements(plan, mesh, BLOCKS))  # type: ignore[arg-type]
    group = SimpleNamespace(size=2, index=split, ranks=(0, 1), process=None)
    fake: Any = SimpleNamespace(cfg=group, device=torch.device("cpu"))

    def end(_: Any) -> None:
        between.end_step()
        rank.steps.append(0)

    with (
        mock.patch.object(conditioning, "all_gather", gathered),
        mock.patch.object(conditioning.dist, "broadcast", lambda tensor, *_, **__: tensor.zero_()),
    ):
        denoise(
            plan,
            lambda _: model,
            TEXT,
            NOISE,
            batched=batched,
            on_block=between.after_block,
            on_step=end,
            run_branches=None if split is None else SplitBranches(fake, between.before_exchange),
            step_noise=lambda: NOISE,
        )
    assert rank.steps.pop() == 0
    return rank.steps


def at_steps_alone(plan: Plan, mesh: Mesh) -> list[list[int]]:
    """The questions of each rank where ranks run different blocks or steps at a time."""
    counts = []
    for index in range(mesh.time):
        rank = Counting()
        between = BetweenBlocks(rank, agreements(plan, mesh, BLOCKS))  # type: ignore[arg-type]
        between.skip_steps(index)
        own = stretch_plan(plan, check_chords(plan, mesh.time), index) if mesh.time > 1 else plan
        for step in own.steps:
            for _ in range(step.forwards * BLOCKS):
                between.after_block()
            between.before_exchange()
            between.end_step()
        counts.append(rank.steps)
    return counts


@pytest.mark.parametrize("name", MESHES)
@torch.no_grad()
def test_every_rank_asks_equally_often(model: WanModel, name: str) -> None:
    mesh, checked, most = Mesh.parse(name), 0, 0
    for arguments, plan in drawn_plans(24 if mesh.layers == mesh.time == 1 else 300):
        due = agreements(plan, mesh, BLOCKS)
        most = max(most, *due)
        if mesh.layers > 1 or mesh.time > 1:
            try:
                check_layers(mesh, model.config, plan)
                counts = at_steps_alone(plan, mesh)
            except OptionError:
                continue
            assert len({sum(one) for one in counts}) == 1 and not sum(due), (arguments, counts)
        else:
            cases: Sequence[tuple[int | None, bool]] = [(None, False), (None, True)]
            cases = cases if mesh.cfg == 1 else [(0, False), (1, False)]
            for split, batched in cases:
                counts = questions(model, plan, mesh, split, batched)
                assert counts == [count + 1 for count in due], (arguments, split, batched)
        checked += 1
    # Of the 12 blocks of a guided step, one agreement behind every 4; a rank of one branch runs 6. None where ranks run
    # different blocks or steps.
    assert checked > 3 and most == {"1x2x2": 3, "2x1x1": 1}.get(name, 0)
