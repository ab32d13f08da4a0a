"""What a sampler says of the next word of `speed` after a run."""

from __future__ import annotations

import re

import pytest

from wan_core.config import OptionError, SkipOptions
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.next_speed import next_speed
from wan_core.sampling.plan import Plan, make_plan


def at(word: str, steps: int = 40) -> Plan:
    return skip_forwards(make_plan(steps=steps), SkipOptions(speed=word), None)


def test_the_next_word_that_saves_is_named_with_what_it_changes() -> None:
    exact, careful = at("exact"), at("careful")
    skipped = exact.forwards - careful.forwards
    line = next_speed(exact, "exact", at, {"high": 1.0, "low": 1.0})
    assert line == f"speed careful: about {skipped:.1f} s less; {skipped} of 80 forwards skipped; fine detail changes"
    assert re.match(r"speed (balanced|fast): about ", next_speed(careful, "careful", at, {"high": 1.0, "low": 1.0}))


def test_nothing_is_said_where_nothing_is_saved_or_measured() -> None:
    assert next_speed(at("fast"), "fast", at, {"high": 1.0, "low": 1.0}) == ""
    assert next_speed(at("exact"), "exact", at, {"high": 1.0}) == ""  # no forward of the other expert was timed
    assert next_speed(at("exact", 4), "exact", lambda _: at("exact", 4), {"high": 1.0, "low": 1.0}) == ""


def test_words_that_a_model_does_not_take_are_passed_over():
    """Said after a run, whose latents an error would lose."""

    def planned(word: str) -> Plan:
        return skip_forwards(make_plan(task="animate2-14B-distilled", steps=4), SkipOptions(speed=word), None)

    with pytest.raises(OptionError, match=r"speed balanced: sparse attention: .*careful and exact read all"):
        planned("balanced")
    assert next_speed(planned("exact"), "exact", planned, {"high": 1.0}) == ""
