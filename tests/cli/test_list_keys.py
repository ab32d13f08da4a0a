"""Keys of listed videos: those of older lists stay, and whatever changes the video changes the key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wan_core.cli import list_keys
from wan_core.cli.list_keys import SAME_RESULT, in_key, key_of
from wan_core.config import (
    AdaptiveOptions,
    ControlOptions,
    GuidanceOptions,
    Keyframe,
    LoadOptions,
    LoraOptions,
    LoraShares,
    MagCacheOptions,
    MotionOptions,
    NagOptions,
    PatternOptions,
    PromptAt,
    Request,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
    WindowOptions,
)
from wan_core.config.table import Option, table
from wan_core.sampling.cache.arguments import parse_setting

TINY = LoadOptions(model="tiny")
FILES = LoadOptions(
    high="h",
    low="l",
    loras=(LoraOptions(path="x", strength=0.5, expert="low"),),
    precision="fp8",
    device="cuda:1",
    compile="blocks",
    keep_blocks=2,
)
SKIPPING = "magcache:0.12/2/0.2:order1+guidance:0.2-0.9+every:2+sparse:0.75/0/0:reuse2"
MEDIA: dict[str, Any] = {"image": "a.png", "last_image": "a.png", "from_video": "b.mp4", "audio": "c.wav"}
DRIVING: dict[str, Any] = {"pose_video": "b.mp4", "face_video": "b.mp4", "background": "b.mp4", "mask": "a.png"}
# As commit 2a01815 makes them: lists with videos of that release, and of earlier ones, are on people's disks.
RECORDED: list[tuple[str, dict[str, Any], LoadOptions]] = [
    ("4bdce873440a7b639f945249db1641b5", {}, TINY),
    (
        "ec8ad09b76324243cc8e099e9a0f4f99",
        {
            "negative_prompt": "",
            "steps": 8,
            "shift": 5.0,
            "boundary": 0.9,
            "guidance_high": 1.0,
            "guidance_low": 2.5,
            "solver": "euler",
            "preset": "none",
            "seed": 7,
            "guidance_mode": "batched",
        },
        TINY,
    ),
    (
        "fca502d30be151155cc2beef9941bb2b",
        {"width": 64, "height": 32, "frames": 33, "fps": 24, "clip_frames": 17, "overlap": 5},
        FILES,
    ),
    (
        "485c9f8adbe3f597019f0f22263c20e2",
        {
            **MEDIA,
            "denoise": 0.5,
            "control_video": "b.mp4",
            "outpaint": (0, 8, 0, 8),
            "camera": "zoom-in",
            "control": ControlOptions(scale=0.5),
        },
        TINY,
    ),
    (
        "28d33cf1f67dc00a2593814bcd7e673d",
        {
            **DRIVING,
            "reference": "a.png",
            "pose_prompt": "b",
            "pose_strength": 0.5,
            "reference_strength": 2.0,
            "face_guidance": False,
        },
        FILES,
    ),
    (
        "5e85bf4c0ed51a00997d15951d47675c",
        {"windows": WindowOptions.parse("81/28:looped_uniform:closed:plain"), "nag": NagOptions()},
        TINY,
    ),
    ("d38709122326e2a417c4fd3f4f492bd2", {"skip": parse_setting(SKIPPING)}, TINY),
    ("a9e56b6ecbfd9d4e24e11217ba2fa0fa", {"skip": parse_setting("taylorseer:2/1/0.2")}, TINY),
    ("d274045ff3f8f6bf00538feb22ae4c0f", {"skip": parse_setting("adaptive:bound:0.05+sparse:bound:0.06")}, TINY),
    ("dbc30254f0a9aa0ecebe25a89ef4d2b5", {"skip": parse_setting("pattern:1101/101/1.5")}, TINY),
    (
        "0d771044b9585d96584d17ca75c1ddb9",
        {
            "keyframes": (Keyframe(frame=8, path="a.png"),),
            "motion": MotionOptions(above=0.985),
            "lora_strengths": (LoraShares(of="high", shares=(0.0, 1.0)),),
            "prompts_at": (PromptAt(frame=0, text="b"),),
            "windows": WindowOptions(length=21, overlap=7, split=True),
            "svi": True,
            "match_colours": 0.5,
        },
        TINY,
    ),
]
# An example of each kind of options in a request, and of where it stands.
INNER: list[Any] = [
    MagCacheOptions(threshold=0.12, max_skips=2, retention=0.2),
    TaylorSeerOptions(interval=3),
    AdaptiveOptions(threshold=0.1),
    PatternOptions(high="1101", low="101"),
    GuidanceOptions(high=0.9),
    SparseOptions(sparsity=0.5, dense_steps=0.0),
    WindowOptions(length=21, overlap=7, schedule="looped_uniform"),
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
    list_keys.contents.cache_clear()
    for name in ("a.png", "b.mp4", "c.wav"):
        Path(name).write_bytes(name.encode())


@pytest.mark.parametrize(("key", "asked", "loaded"), RECORDED, ids=[key[:6] for key, _, _ in RECORDED])
def test_keys_are_those_of_older_lists(key: str, asked: dict[str, Any], loaded: LoadOptions) -> None:
    assert key_of(Request(prompt="a", **asked), loaded) == key


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
        if name != "measured_steps":  # what a preset's file says of itself is no option
            changed = replace(example, **{name: another(one, name, getattr(example, name))})
            assert in_key(changed) != in_key(example), name


def test_what_a_preset_says_of_itself_makes_no_other_video() -> None:
    pattern = parse_setting("pattern:1101/1101/1")
    assert pattern is not None
    measured = replace(REQUEST, skip=replace(pattern, measured_steps=20))
    assert key_of(measured, TINY) == key_of(replace(REQUEST, skip=pattern), TINY) != key_of(REQUEST, TINY)


def test_contents_of_files_change_the_key() -> None:
    for asked in ({"image": "a.png"}, {"control_video": "a.png"}, {"keyframes": (Keyframe(frame=4, path="a.png"),)}):
        request = replace(REQUEST, **asked)
        before = key_of(request, TINY)
        list_keys.contents.cache_clear()
        Path("a.png").write_bytes(str(asked).encode())
        assert key_of(request, TINY) != before


def test_a_key_is_the_same_for_a_list_of_loras_as_the_command_line_makes_it() -> None:
    listed = replace(FILES)
    object.__setattr__(listed, "loras", list(FILES.loras))
    assert key_of(Request(prompt="a"), listed) == key_of(Request(prompt="a"), FILES)
