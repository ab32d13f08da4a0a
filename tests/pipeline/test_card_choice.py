"""The table of cards and the choice by card: `auto`, `fast`, the doctor and docs/choices.md say the same."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.cli import doctor
from wan_core.config import OptionError
from wan_core.ops.attention.registry import BACKENDS, auto_choice, resolve_attention
from wan_core.ops.attention.sparse.kernels import KERNELS
from wan_core.ops.cards import CARDS, NO_CARD, Capability, card_of
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.pipeline.card_choice import card_choices, choice_lines

HALF = torch.bfloat16
CAPABILITIES = [(major, minor) for major in range(5, 14) for minor in (0, 5, 6, 9)]


@pytest.mark.parametrize("card", [*CARDS, NO_CARD], ids=lambda card: card.name)
def test_every_name_of_the_table_is_known_and_can_run_on_its_card(card):
    assert card.attention[-1] == "sdpa" and all(BACKENDS[name].exact for name in card.attention)
    assert all(not BACKENDS[name].exact for name in card.rounding)
    capability = None if card is NO_CARD else card.since
    for name in (*card.attention, *card.rounding):
        assert BACKENDS[name].needs.why_not(capability, HALF, 128) is None
    for name in card.sparse:
        assert KERNELS[name].needs.why_not(capability, HALF, 128) is None
    assert set(card.precision) <= SCHEMES.keys()
    assert card.int8[-1] != "kitchen", "one way runs without comfy-kitchen"


def test_a_card_has_the_last_row_that_is_not_newer():
    assert [card.since for card in CARDS] == sorted(card.since for card in CARDS)
    names = {(7, 0): NO_CARD.name, (7, 5): "Turing", (8, 6): "Ampere", (8, 9): "Ada", (9, 0): "Hopper"}
    names |= {(10, 3): "Blackwell, data centre", (12, 1): "Blackwell, GeForce and RTX PRO"}
    assert {capability: card_of(capability).name for capability in names} == names
    assert card_of(None) is NO_CARD and card_of((99, 0)) is CARDS[-1]


def test_fast_takes_what_rounds_and_auto_never_does():
    for capability, fast in itertools.product([None, *CAPABILITIES], (False, True)):
        name = auto_choice(capability, HALF, 128, lambda _: True, rounding=fast)
        assert BACKENDS[name].exact == (not fast or card_of(capability) is NO_CARD), (capability, fast)
        assert auto_choice(capability, HALF, 128, {"sdpa"}.__contains__, rounding=fast) == "sdpa"
        assert auto_choice(capability, torch.float32, 128, lambda _: True, rounding=fast) == "sdpa"
    assert resolve_attention("fast", torch.device("cpu"), torch.float32, 128)[0] == "sdpa"


def test_a_model_that_merges_attention_gets_a_backend_with_a_log_sum_exp():
    for capability, fast in itertools.product([None, *CAPABILITIES], (False, True)):
        name = auto_choice(capability, HALF, 128, lambda _: True, rounding=fast, needs_lse=True)
        assert BACKENDS[name].gives_lse, (capability, fast)
        if BACKENDS[other := auto_choice(capability, HALF, 128, lambda _: True, rounding=fast)].gives_lse:
            assert name == other
    said = card_choices((8, 6), 24.0, lambda kind, name: True)[1].why
    assert "`fast` takes sage" in said and "for Animate-2 flash2" in said


def values(capability: Capability, gib: float, runs) -> dict[str, str]:
    return {one.what: one.value for one in card_choices(capability, gib, runs)}


def test_what_is_missing_changes_the_choice():
    everything, nothing = lambda kind, name: True, lambda kind, name: False
    assert values((8, 6), 24, everything) == {"precision": "int8", "attention": "auto (flash2)", "residency": "swap"}
    short = values((8, 6), 24, nothing)
    assert short["precision"] == "fp8-weights" and short["attention"] == "auto (sdpa)"
    blocks = [values((8, 9), 16, lambda kind, _, k=k: kind != "kernels" or k)["residency"] for k in (True, False)]
    assert blocks[0] == "stream, 26 of 40 blocks stay" and blocks[1] < blocks[0], "plain torch takes more beside them"
    assert values((8, 0), 80, nothing)["precision"] == "checkpoint", "bf16 fits"
    assert values((8, 9), 48, lambda kind, name: name != "fp8")["precision"] == "fp8-tensor"
    assert values((9, 0), 141, everything)["residency"] == "resident"
    assert values((12, 0), 8, everything)["residency"] == "does not fit"
    with pytest.raises(OptionError, match="memory limit"):
        card_choices((8, 6), 1, everything)


@given(capability=st.sampled_from(CAPABILITIES), gib=st.floats(4, 200), more=st.floats(0, 100), kernels=st.booleans())
def test_more_memory_never_makes_residency_worse(capability, gib, more, kernels):
    def rank(memory: float) -> tuple[int, int]:
        value = values(capability, memory, lambda kind, name: kind != "kernels" or kernels)["residency"]
        order = ("does not fit", "stream", "swap", "resident")
        blocks = re.search(r"(\d+) of", value)
        return order.index(value.partition(",")[0]), int(blocks[1]) if blocks else 0

    assert rank(gib) <= rank(gib + more)


def test_the_doctor_says_it_with_reasons():
    assert doctor.examine("cpu")["card"] is None
    choices = card_choices((8, 6), 24, lambda kind, name: True)
    lines = choice_lines(choices)
    assert all(
        one.why and f"{one.value}, because {one.why}" in line for one, line in zip(choices, lines[1:], strict=True)
    )
    report = doctor.examine("cpu") | {"card": {one.what: {"value": one.value, "why": one.why} for one in choices}}
    assert "\n".join(lines) in doctor.text(report)
