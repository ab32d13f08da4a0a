"""How the memory plan, the nodes and a run keep what Animate-2 prepares beside text: one choice, from numbers alone."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from wan_core.config import LoadOptions, Request
from wan_core.config.host_memory import HOST_RESERVE
from wan_core.execution.memory.planning import GIB, Beside, MemoryPlan, Sizes, limited, plan_memory
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.models.wan.families.animate2 import Form, attention
from wan_core.pipeline.card_choice import task_memory

CARDS = (8, 12, 16, 24, 48, 80, 141)
SIZES = {"480p": (832, 480), "720p": (1280, 720)}
DEVICE, HOST, FP8_HOST = Form(), Form(on_host=True), Form(on_host=True, fp8=True)
# For each card: how 81 frames are kept, and how many of 40 blocks stay.
TABLE = {
    ("bf16", "480p"): [(FP8_HOST, 0), (HOST, 3), (HOST, 8), (HOST, 18), (DEVICE, 18), (DEVICE, 40), (DEVICE, 40)],
    ("bf16", "720p"): [(FP8_HOST, 0), (FP8_HOST, 0), (HOST, 0), (HOST, 10), (HOST, 40), (DEVICE, 10), (DEVICE, 40)],
    ("fp8", "480p"): [(FP8_HOST, 0), (HOST, 8), (HOST, 19), (HOST, 40), (DEVICE, 40), (DEVICE, 40), (DEVICE, 40)],
    ("fp8", "720p"): [(FP8_HOST, 0), (FP8_HOST, 0), (HOST, 2), (HOST, 23), (HOST, 40), (DEVICE, 22), (DEVICE, 40)],
}
HOSTS = (None, *(gib * GIB for gib in (8, 32, 64, 96, 128, 256)))
CASES = [(precision, size, card) for precision in ("bf16", "fp8", "int8") for size in SIZES for card in CARDS]


@cache
def needs(precision: str, size: str) -> tuple[Sizes, Beside]:
    width, height = SIZES[size]
    options = LoadOptions(model="random:animate2-14B", precision=precision)
    return task_memory(options, Request(prompt="", width=width, height=height, frames=81))


def plan_of(precision: str, size: str, card: float, host: int | None = None) -> MemoryPlan:
    return plan_memory(*needs(precision, size), limited(card), host=host)


def in_one_form(precision: str, size: str, card: int, host: int | None = None) -> list[MemoryPlan]:
    """A plan for each form alone that fits."""
    sizes, activations = needs(precision, size)
    plans = [
        plan_memory(sizes, replace(activations.kept_as(form), forms=()), limited(card)) for form in activations.forms
    ]
    plans = [
        replace(plan, form=form, copied=plan.copied + form.copied, host=plan.host + form.host)
        for plan, form in zip(plans, activations.forms, strict=True)
    ]
    fit = [plan for plan in plans if plan.denoise <= plan.room]
    return [p for p in fit if host is None or not (p.form and p.form.host) or p.host + HOST_RESERVE <= host]


@pytest.mark.parametrize(("precision", "size"), TABLE)
def test_every_card_has_its_form(precision: str, size: str) -> None:
    plans = [plan_of(precision, size, card) for card in CARDS]
    assert [(plan.form.form, plan.resident_blocks) for plan in plans if plan.form] == TABLE[precision, size]


@pytest.mark.parametrize(("precision", "size", "card"), CASES)
def test_the_cheapest_form_that_fits_is_planned(precision: str, size: str, card: int) -> None:
    for host in HOSTS:
        plan, fitting = plan_of(precision, size, card, host), in_one_form(precision, size, card, host)
        assert plan.form is not None
        if not fitting:
            assert plan.denoise > plan.room or plan.host > (host or 0) - HOST_RESERVE
            continue
        assert plan.denoise <= plan.room
        exact = [one for one in fitting if one.exact]
        assert plan.exact == bool(exact)
        assert plan.copied == min(one.copied for one in exact or fitting)
    if not plan.fits:
        assert f"card of {math.ceil(plan.card_gib)} GiB" in plan.table()
        assert plan_of(precision, size, math.ceil(plan.card_gib)).fits


@pytest.mark.parametrize(("precision", "size", "card"), CASES)
def test_a_run_keeps_what_was_planned(precision: str, size: str, card: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory free that the plan counts on. Where others took it, in host memory."""
    (sizes, activations), cuda = needs(precision, size), torch.device("cuda")
    monkeypatch.setattr(attention, "available_bytes", lambda: 200 * GIB)
    for host in HOSTS:
        plan = plan_of(precision, size, card, host)
        form, free = plan.form, limited(card) - stage_bytes(sizes.units, plan.staying_blocks)
        assert form is not None
        if plan.denoise <= plan.room:
            monkeypatch.setattr(attention, "free_on", lambda _, free=free: free)
            assert attention.choose_form(activations.forms, form, 0, 0, cuda) == form.form
            monkeypatch.setattr(attention, "free_on", lambda _, form=form: form.device)
            assert attention.choose_form(activations.forms, form, 0, 0, cuda) == (HOST if plan.exact else FP8_HOST)


def test_host_memory_of_the_run_before_is_used_again_for_the_same_size_alone() -> None:
    """It stays pinned, and is not available then: the same video is kept the same way, and another is not promised
    what is left over from this one."""
    before = plan_of("fp8", "720p", 24, 130 * GIB)
    assert before.form is not None and before.form.form == HOST
    host_bytes = 130 * GIB - before.form.host
    again = {size: plan_memory(*needs("fp8", size), limited(24), host=host_bytes, kept=before.form) for size in SIZES}
    fresh = {size: plan_of("fp8", size, 24, host_bytes) for size in SIZES}
    assert again["720p"] == before != fresh["720p"] and again["480p"] == fresh["480p"]
    assert fresh["720p"].form is not None and fresh["720p"].form.form.fp8
