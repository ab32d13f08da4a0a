"""The suite `contributions`: a part is left out exactly and put back, and its share is of what its block adds."""

from __future__ import annotations

import pytest
import torch

from benchmarks.contributions import BOUNDARIES, PARTS, Norms, cost_shares, last_product, left_out, other_plans
from tests.sampling.test_denoise import EXPERTS, NOISE, TEXT
from wan_core.sampling.denoise import denoise
from wan_core.sampling.plan import make_plan

PLAN = make_plan(steps=2)


def made():
    with torch.no_grad():
        return denoise(PLAN, EXPERTS.__getitem__, TEXT, NOISE)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_left_out_and_put_back(part):
    model, before = EXPERTS["high"], made()
    with left_out(model, 0, [part]):
        assert all(not weight.any() for weight in last_product(model.blocks[0], part).parameters())
        assert not torch.equal(made(), before)
    assert torch.equal(made(), before)


def test_shares():
    model, before = EXPERTS["high"], made()
    norms = Norms(model, 1, PARTS)
    with model.runners.adding(norms):
        assert torch.equal(made(), before)  # looking changes nothing
    assert norms.shares == pytest.approx([1.0] * len(norms.shares)) and norms.shares
    assert sum(cost_shares().values()) == pytest.approx(1)
    assert cost_shares()["self-attention"] == max(cost_shares().values())


def test_other_plans_change_one_thing_each():
    plan = make_plan(task="t2v-tiny", steps=20)
    found = dict(other_plans(plan))
    assert len(found) == 20 + 18 + 2 * len(BOUNDARIES) - 1  # each phase's first step has nothing to be forecast from
    for name, other in found.items():
        if name.startswith("step"):
            changed = [i for i, (a, b) in enumerate(zip(plan.steps, other.steps, strict=True)) if a != b]
            assert changed == [int(name.split()[1].strip(","))]
            assert other.forwards == plan.forwards - (2 if name.endswith("forecast") else 1)
        else:
            assert (other.forwards < plan.forwards) == name.endswith("speed:balanced")
