"""Keys of listed videos: whatever changes the video changes the key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wan_core.config import (
    ControlOptions,
    Keyframe,
    LoadOptions,
    LoraOptions,
    LoraShares,
    MagCacheOptions,
    MotionOptions,
    NagOptions,
    PromptAt,
    Request,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
)
from wan_core.config.keys import SAME_RESULT, in_key, key_of
from wan_core.config.table import Option, table

TINY = LoadOptions(model="tiny")
# An example of each kind of options in a request, and of where it stands.
INNER: list[Any] = [
    MagCacheOptions(threshold=0.12, max_skips=2, retention=0.2),
    TaylorSeerOptions(interval=3),
    SparseOptions(sparsity=0.5),
    NagOptions(),
    ControlOptions(end=0.9),
    MotionOptions(above=0.9),
    LoraShares(of="all", shares=(0.5,)),
    Keyframe(frame=4, path="a.png"),
    PromptAt(frame=0, text="a"),
    SkipOptions(),
]
# Other values of fields whose kind does not say one.
OTHER: dict[str, Any] = {
    "speed": "fast",
    "width": 64, "height": 64, "outpaint": (0, 8, 0, 8), "high": "1", "low": "1", "shares": (0.25,),
    **{one: (next(x for x in INNER if isinstance(x, kind)),) for one, kind in [
        ("keyframes", Keyframe), ("prompts_at", PromptAt), ("lora_strengths", LoraShares),
    ]},
    "loras": (LoraOptions(path="x"),),
}  # fmt: skip
REQUEST = Request(prompt="b", width=32, height=32)


@pytest.fixture(autouse=True)
def media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.mp4", "c.wav"):
        Path(name).write_bytes(name.encode())


def another(one: Option, name: str, value: Any) -> Any:
    """Another value of a field that has this one."""
    if one.choices:
        return next(choice for choice in one.choices if choice != value)
    if one.type is bool:
        return not value
    if one.nested:
        return next(example for example in INNER if isinstance(example, one.type))
    if one.type in (int, float):
        if value is None:
            return one.type(one.low or 1)
        return 2 * value + 2 if one.type is int else 0.9 * value or 0.25
    return OTHER.get(name, "other")


@pytest.mark.parametrize("name", table(Request))
def test_each_field_of_a_request_changes_the_key(name: str) -> None:
    changed = another(table(Request)[name], name, getattr(REQUEST, name))
    assert key_of(replace(REQUEST, **{name: changed}), TINY) != key_of(REQUEST, TINY)


@pytest.mark.parametrize("name", table(LoadOptions))
def test_each_option_of_loading_that_changes_the_video_changes_the_key(name: str) -> None:
    changed = replace(TINY, **{name: another(table(LoadOptions)[name], name, getattr(TINY, name))})
    assert (key_of(REQUEST, changed) == key_of(REQUEST, TINY)) == (name in SAME_RESULT)


@pytest.mark.parametrize("example", INNER, ids=lambda example: type(example).__name__)
def test_each_field_within_an_option_changes_what_a_key_has(example: Any) -> None:
    for name, one in table(type(example)).items():
        changed = replace(example, **{name: another(one, name, getattr(example, name))})
        assert in_key(changed) != in_key(example), name


def kinds_within(options: Any) -> Iterator[type]:
    """All classes of options that stand in fields of options."""
    for one in table(options).values():
        if one.nested:
            yield one.type
            yield from kinds_within(one.type)


def test_each_kind_of_options_has_an_example() -> None:
    assert {kind for of in (Request, LoadOptions) for kind in kinds_within(of)} <= {type(one) for one in INNER}


def test_contents_of_files_change_the_key() -> None:
    for asked in ({"image": "a.png"}, {"control_video": "a.png"}, {"keyframes": (Keyframe(frame=4, path="a.png"),)}):
        request = replace(REQUEST, **asked)
        before = key_of(request, TINY)
        Path("a.png").write_bytes(str(asked).encode())
        assert key_of(request, TINY) != before
