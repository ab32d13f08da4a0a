"""The memory that residuals were planned to take, beside what they take: over sizes, policies and families."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.denoised import denoise
from tests.sampling.family_runs import CONFIGS, GRIDS, plan_for, prepared_model, run
from tests.sampling.test_denoise import EXPERTS, TEXT
from tests.sampling.test_residual import SETTINGS
from wan_core.config import SkipOptions, TaylorSeerOptions
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Run
from wan_core.sampling.cache import residual
from wan_core.sampling.cache.residual import residual_bytes
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.plan import Plan, make_plan

SKIP = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, retention=0.2))


@pytest.fixture
def kept_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the bytes of all residuals after each forward."""
    byte_counts: list[int] = [0]

    class Counted(residual.ResidualCache):
        def __call__(self, inputs: BlockInputs, inner: Run) -> torch.Tensor:
            tokens = super().__call__(inputs, inner)
            byte_counts.append(sum(one.bytes for one in self.kept.values()))
            return tokens

    monkeypatch.setattr(residual, "ResidualCache", Counted)
    return byte_counts


def planned(plan: Plan, model: WanModel, shape: tuple[int, ...]) -> int:
    B, _, T, Y, X = shape
    tokens = B * model.config.most_tokens(T, Y, X)
    return residual_bytes(plan, tokens, model.config.dim, 4)


@pytest.mark.parametrize("policy", SETTINGS)
def test_what_is_planned_is_kept(kept_bytes: list[int], policy: str) -> None:
    for videos in (1, 2):
        shape = (videos, 16, 7, 4, 8)
        plan = make_plan(steps=14, solver="euler")
        plan = skip_forwards(plan, SETTINGS[policy], None)
        kept_bytes.clear()
        with torch.no_grad():
            denoise(plan, EXPERTS.__getitem__, TEXT, draw_noise(1, shape))
        assert planned(plan, EXPERTS["high"], shape) == max(kept_bytes, default=0), videos


@pytest.mark.parametrize("name", CONFIGS)
def test_families_keep_all_their_tokens(kept_bytes: list[int], name: str) -> None:
    plan = replace(plan_for("vace", steps=10), name="t2v-14B")
    plan, model, (frames, rows, columns) = skip_forwards(plan, SKIP, None, None), prepared_model(name), GRIDS[name]
    run(model, name, plan, videos=2)
    assert planned(plan, model, (2, 16, frames, 2 * rows, 2 * columns)) == max(kept_bytes)
