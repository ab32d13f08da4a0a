"""The table of options: whatever is declared of an option holds for every door. One case for each option."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

import pytest

from wan_core.cli import build_parser
from wan_core.config import (
    ControlOptions,
    LoadOptions,
    LoraOptions,
    MagCacheOptions,
    NagOptions,
    OptionError,
    PlanNumbers,
    Request,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
)
from wan_core.config.table import Option, parse_slashes, parse_words, slashes, spelled, table
from wan_core.workers.wire import unpack

EXAMPLES: list[Any] = [
    MagCacheOptions(threshold=0.12, max_skips=2, retention=0.2),
    TaylorSeerOptions(interval=3),
    SparseOptions(sparsity=0.5),
    NagOptions(),
    ControlOptions(),
    LoraOptions(path="a.safetensors"),
    LoadOptions(model="tiny"),
    PlanNumbers(),
    Request(prompt="a"),
]
SHORT = (TaylorSeerOptions, NagOptions)  # written between slashes
CASES = [(example, name) for example in EXAMPLES for name in table(type(example))]
ids = [f"{type(example).__name__}.{name}" for example, name in CASES]
every_option = pytest.mark.parametrize(("example", "name"), CASES, ids=ids)


def numbers_beyond(one: Option) -> list[float]:
    """Numbers just outside of its range, and those that are none."""
    if one.low is None or one.high is None:
        return []
    step = 1 if one.type is int else 1e-3
    return [one.low - step, one.high + step, *([] if one.type is int else [float("nan"), float("inf")])]


@every_option
def test_what_is_outside_of_its_range_or_choices_is_refused_by_name(example: Any, name: str) -> None:
    one = table(type(example))[name]
    for number in numbers_beyond(one):
        with pytest.raises(OptionError) as fault:
            replace(example, **{name: number})
        assert f"{one.name} {number:g} given; allowed are" in str(fault.value)
    if one.choices:
        with pytest.raises(OptionError, match=rf"{one.name} 'other' is not known; use one of: {one.choices[0]}"):
            replace(example, **{name: "other"})
        for value in one.choices:
            assert one.default is not None and value in (one.default, *one.choices)


@every_option
def test_a_widget_offers_what_is_taken(example: Any, name: str) -> None:
    """0 may stand for None, the model's own number."""
    one = table(type(example))[name]
    if not one.tip:
        return
    shown = one.default if one.shown is None else one.shown
    assert one.tip.endswith((".", "{own}."))
    if isinstance(shown, bool | str):
        assert shown in (one.choices or (shown,))
        return
    least, most = (one.low if one.least is None else one.least), (one.high if one.most is None else one.most)
    assert least is not None and (most is None or least <= shown <= most)
    assert one.low is None or least >= one.low or (least == 0 and one.default is None)
    assert one.high is None or most is None or most <= one.high
    assert isinstance(shown, int) or one.step


def test_nested_options_come_back_from_json() -> None:
    skip = SkipOptions(sparse=SparseOptions(sparsity=0.5, ramp=0.1), taylorseer=TaylorSeerOptions(interval=2))
    request = Request(prompt="", skip=skip, nag=NagOptions(), outpaint=(0, 8, 0, 8), control=ControlOptions(scale=0.5))
    assert unpack(Request, json.loads(json.dumps(asdict(request)))) == request


@pytest.mark.parametrize("example", [one for one in EXAMPLES if type(one) in SHORT], ids=lambda one: type(one).__name__)
def test_short_forms_are_read_as_they_are_printed(example: Any) -> None:
    kind, form = type(example), "it: so and so"
    assert parse_slashes(kind, slashes(example), form) == example
    required = [one.name for one in fields(kind) if one.default is MISSING]
    assert parse_slashes(kind, slashes(example, *(required or ["scale"])), form) == example
    for text in ("", "x", "/", slashes(example) + "/1"):
        with pytest.raises(OptionError, match=r"it '.*' given; write so and so|given"):
            parse_slashes(kind, text, form)


@every_option
def test_words_of_short_forms_say_one_thing(example: Any, name: str) -> None:
    kind = type(example)
    one = table(kind)[name]
    values = [*one.words.values(), *([2 if one.type is int else 0.25] if one.prefix else [])]
    for value in values:
        short_form = spelled(replace(example, **{name: value}), name)
        assert short_form or value == one.default
        assert parse_words(kind, short_form) == ({name: value} if short_form else {})
    for word in ("other", f"{one.prefix}x"):
        with pytest.raises(ValueError, match=word):
            parse_words(kind, [word])


@pytest.mark.parametrize("kind", [LoadOptions, Request, PlanNumbers, SkipOptions])
def test_the_command_line_has_each_option_that_has_a_help_text(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser().commands["generate"]
    for one in table(kind).values():
        flag = f"--{one.flag}".replace("_", "-")
        assert (flag in parser._option_string_actions) == (one.help is not None) or flag == "--prompt", flag
        if one.help is not None and one.choices:
            with pytest.raises(SystemExit):
                parser.parse_args(["--prompt", "a", flag, "7"])
            assert "use one of: " in capsys.readouterr().err
