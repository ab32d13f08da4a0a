"""Animate-2 of full width on an emulated smaller GPU: it keeps what the memory plan says, within the plan's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from wan_core.checkpoint.random import random_module
from wan_core.execution.memory.planning import (
    FACTORS,
    GIB,
    MemoryPlan,
    Sizes,
    beside_weights,
    plan_memory,
    unit_bytes,
)
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import optimize
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.animate2 import ANIMATE2_14B, FORMS, Form
from wan_core.ops.attention.registry import resolve_attention

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CONFIG = replace(ANIMATE2_14B, num_layers=8)
LATENTS = (1, 16, 22, 60, 104)  # 81 frames at 832x480, and the reference


@pytest.fixture(autouse=True)
def whole_card() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def planned(available: float, host: int | None = None) -> MemoryPlan:
    sizes = Sizes(units=unit_bytes(CONFIG, 2, False), experts=1, text_encoder=0, vae=0)
    activations = beside_weights(CONFIG, VAE_21, LATENTS, per_token=FACTORS["fused"], guided=False)
    return plan_memory(sizes, replace(activations, text=0, decode=0), int(available), host=host)


def smallest(form: Form, host: int | None = None) -> tuple[float, MemoryPlan]:
    """The least memory for which this form is planned, and the plan."""
    rooms = [quarter * GIB / 4 for quarter in range(8, 160)]
    return next((room, p) for room in rooms if (p := planned(room, host)).fits and p.form and p.form.form == form)


@torch.no_grad()
def test_every_form_takes_at_most_what_is_planned_and_the_exact_ones_are_equal() -> None:
    _B, _, T, Y, X = LATENTS
    rows = torch.Generator().manual_seed(0)
    x = torch.randn(1, 36, T, Y, X, generator=rows).to(CUDA)
    timestep, context = torch.tensor([700.0], device=CUDA), torch.randn(1, 512, 4096, generator=rows).to(CUDA)
    inputs = {
        "image": torch.randn(1, 257, 1280, generator=rows).to(CUDA),
        "pose": torch.randn(1, 36, T - 1, Y, X, generator=rows).to(CUDA),
    }
    attend = resolve_attention("auto", CUDA, torch.bfloat16, CONFIG.head_dim)[1]
    model = random_module(CONFIG, device="cpu", dtype=torch.bfloat16, draw_on=CUDA)
    model = optimize(model, attend=attend, device=CUDA)
    outputs = {}
    for form in FORMS:
        # Host memory for FP8 alone, where exact forms are not meant.
        host = sum(unit_bytes(CONFIG, 2, False)) + 9 * GIB if form.fp8 else None
        available, plan = smallest(form, host)
        residency = Residency(CUDA, plan.policy, resident_blocks=plan.resident_blocks, form=plan.form)
        assert plan.policy == "stream"
        residency.add("high", model)
        torch.cuda.empty_cache()
        bytes_before = torch.cuda.memory_allocated()  # inputs
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((available + bytes_before) / total)
        torch.cuda.reset_peak_memory_stats()
        ready = residency.use("high")
        outputs[form] = [ready(x, timestep, ready.prepare_text(context, **inputs)).cpu() for _ in range(2)]
        peak = torch.cuda.max_memory_allocated() - bytes_before
        prepared_form = ready.prepared_form
        summary = (
            f"{form.words()}: {peak / GIB:.2f} GiB of {plan.denoise / GIB:.2f} planned, room {available / GIB:.2f}"
        )
        print(summary, f"{plan.policy}, {plan.resident_blocks} of {plan.blocks} blocks stay")
        assert prepared_form is not None and prepared_form.form == form and peak <= plan.denoise
        assert torch.equal(*outputs[form])
        residency.remove("high")
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(outputs[FORMS[0]][0], outputs[FORMS[1]][0]) and torch.equal(
        outputs[FORMS[2]][0], outputs[FORMS[3]][0]
    )
