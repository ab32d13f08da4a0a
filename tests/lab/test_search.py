"""The search for presets: what it finds on a made-up landscape, what it writes on the embedded model and refuses."""

from __future__ import annotations

import json
from functools import cache
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wan_core.cli import main
from wan_core.config import OptionError
from wan_core.models.wan.families import find_task
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import parse_setting, speed_options
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.native.plan import check_native
from wan_core.sampling.plan import make_plan
from wan_core.sampling.schedules import Window
from wan_core.sampling.speed_presets import FOLDER, RENAMED, SUFFIX, find_speed, read_speed, searched_names, speed_names
from wan_lab.search import AXES, LEAST, Candidate, Search, least_seconds, spread
from wan_lab.search_run import (
    FULL_TASKS,
    H200_BESIDE,
    H200_FORWARD,
    H200_SIZE,
    estimated_seconds,
    full_size,
    named,
    size_of,
)

PHASES = (26, 14)  # of 40 steps


@cache
def planned(setting):
    return skip_forwards(make_plan(steps=40), parse_setting(setting), None)


@cache
def seconds(setting):
    """A forward takes 1, with sparse attention less."""
    plan = planned(setting)
    return sum(step.forwards * (1 - 0.6 * step.sparsity) for step in plan.steps)


def quality(setting, count):
    """Made up: what is left out costs, skipped steps in the first half three times as much."""
    plan = planned(setting)
    loss = sum((3 if step.index < 20 else 1) * 0.1 for step in plan.steps if step.skipped)
    loss += sum(step.sparsity**3 for step in plan.steps if not step.skipped)
    return [50 - loss + 0.01 * video for video in range(count)]


def searched(target, measure=quality, **options):
    measured = {}

    def noted(setting, count):
        measured[setting] = max(count, measured.get(setting, 0))
        return measure(setting, count)

    search = Search(PHASES, seconds, noted, count=8, first=2, **options)
    return search.within(target), measured, search


def test_it_finds_the_best_of_its_candidates_and_improves_it():
    best, measured, search = searched(30.0, seed=1)  # with some seeds no change among those tried is better
    alone = max(quality(one.setting, 1)[0] for one in search.candidates(30.0))
    assert seconds(best.setting) <= 30 and quality(best.setting, 1)[0] > alone
    assert all(seconds(setting) <= 30 for setting in measured)
    # halving: few of the settings are measured on all videos
    assert 0 < sum(count == 8 for count in measured.values()) < len(measured) / 2


@pytest.mark.parametrize("name", searched_names())
def test_a_preset_is_a_candidate(name):
    """The candidate of a preset computes the preset's steps, and its own words are a fixed point."""
    setting, plan = find_speed(name).setting, make_plan(task="i2v-A14B" if "i2v" in name else "t2v-A14B")
    one = Candidate.of(setting, plan, AXES)
    steps = [skip_forwards(plan, parse_setting(text), None).steps for text in (setting, one.setting)]
    assert steps[0] == steps[1]
    assert Candidate.of(one.setting, plan, AXES) == one


def test_a_search_is_at_least_as_good_as_where_it_starts():
    best, _, _ = searched(30.0)
    again, measured, _ = searched(30.0, starts=[best], rounds=0)
    assert quality(again.setting, 1)[0] >= quality(best.setting, 1)[0] and best.setting in measured
    beyond, measured, _ = searched(20.0, starts=[best], rounds=0)
    assert seconds(beyond.setting) <= 20 and best.setting not in measured  # it takes more


def test_a_start_of_other_parts_is_refused():
    with pytest.raises(OptionError, match="leave magcache:balanced out"):
        Candidate.of("magcache:balanced+sparse:0.5/0/0", make_plan(), AXES)


def test_the_same_seed_searches_the_same():
    assert searched(30.0)[0:2] == searched(30.0)[0:2]


def test_a_bound_of_quality_is_kept_by_the_fastest():
    _, _, search = searched(30.0)
    fastest = least_seconds(search, 45.0, 80.0)
    assert search.score(fastest, 8) >= 45
    faster = search.within(seconds(fastest.setting) * 0.8)
    assert search.score(faster, 8) < 45
    unreachable = least_seconds(search, 60.0, 80.0)
    assert unreachable.setting == "full"


def test_too_few_seconds_are_refused_with_what_is_possible():
    with pytest.raises(OptionError, match="the fastest takes"):
        searched(3.0)


@settings(max_examples=200, deadline=None)
@given(st.integers(LEAST, 40), st.integers(1, 39), st.sampled_from([1.0, 1.35, 2.0]))
def test_steps_are_spread_over_every_phase(count, high, early):
    phases = (high, 40 - high)
    steps = spread(count, phases, early)
    assert len(steps) == count and {0, high, 39} <= steps <= set(range(40))
    for sparse_setting in ("", AXES["sparse"][1]):
        one = Candidate((sparse_setting, ""), phases, steps)
        marks = one.pattern().high + one.pattern().low
        assert len(one.pattern().high) == high and {i for i, mark in enumerate(marks) if mark == "1"} == steps


@settings(max_examples=100, deadline=None)
@given(st.integers(LEAST, 40), st.integers(1, 39))
def test_steps_are_even_within_every_phase(count, high):
    steps = sorted(spread(count, (high, 40 - high), 1.0))
    for first, last in ((0, high), (high, 39)):
        within = [step for step in steps if first <= step <= last]
        gaps = [after - before for before, after in pairwise(within)]
        assert not gaps or max(gaps) - min(gaps) <= 1, steps


def test_every_word_of_the_axes_is_a_setting_and_blocks_may_be_chosen_by_error():
    for word in filter(None, chain(*AXES.values())):
        assert parse_setting(word) is not None
    _, measured, _ = searched(30.0)
    assert any(":error" in setting for setting in measured)


def test_more_steps_at_the_beginning_where_asked():
    even, early = (sorted(spread(12, PHASES, power)) for power in (1.0, 1.35))
    assert sum(step < 20 for step in early) > sum(step < 20 for step in even)


# ------------------------------------------------------------------------------------------------------------- command

SMALL = ["search", "--model", "tiny", "--device", "cpu", "--steps", "10", "--frames", "5", "--size", "64x48"]
FEW = ["--count", "2", "--first", "1", "--rounds", "1", "--changes", "2", "--prompt", "a red circle", "--prompt", "a"]


def test_a_search_writes_a_preset_and_goes_on_where_it_was(tiny_assets, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("wan_lab.search.AXES", {"sparse": ("", AXES["sparse"][1]), "guidance": ("",)})
    assert main([*SMALL, *FEW, "--seconds", "mine=80", "--out", str(tmp_path)]) == 0
    first = capsys.readouterr()
    path = tmp_path / f"mine{SUFFIX}"
    written = json.loads(path.read_text())
    assert written["setting"] in first.out and written["seconds"] <= 80
    assert written["videos"] == 2 and {"psnr", "psnr_worst", "ssim", "psnr_se"} <= written.keys()
    front = [(row["seconds"], row["psnr"]) for row in written["rows"]]
    assert front == sorted(front) and any(row["setting"] == written["setting"] for row in written["rows"])
    assert speed_options(str(path)) == parse_setting(written["setting"])
    assert main(["plan", "--steps", "40", "--speed", str(path)]) == 0
    rows = (tmp_path / "t2v-tiny-10.rows.jsonl").read_text()
    assert main([*SMALL, *FEW, "--seconds", "mine=80", "--out", str(tmp_path), "--overwrite"]) == 0
    assert (tmp_path / "t2v-tiny-10.rows.jsonl").read_text() == rows  # nothing was measured again
    assert json.loads(path.read_text())["setting"] == written["setting"]
    assert main([*SMALL, *FEW, "--seed", "1", "--seconds", "mine=80", "--out", str(tmp_path)]) == 2
    assert "other videos" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--seconds", "x"], ["--seconds", "../x=3"], ["--seconds", "a=1", "--psnr", "a=2"]]
)
def test_the_command_refuses(arguments, tiny_assets, tmp_path, capsys):
    assert main([*SMALL, "--out", str(tmp_path / "new"), *arguments]) == 2
    told = capsys.readouterr().err
    assert "wan_core search" in told and ("given" in told or "no preset" in told)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--first", "0"], "at least 1 video"),
        (["--of-task", "nothing"], "nothing"),
        (["--of-task", "t2v-tiny"], "no size of its own"),
        (["--of-task", "t2v-A14B", "--of-size", "1280x720"], "write WIDTHxHEIGHTxFRAMES"),
    ],
)
def test_options_are_refused_before_anything_is_loaded(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Pipeline, "load", lambda *_, **__: pytest.fail("loaded"))
    assert main([*SMALL, "--seconds", "a=1", *arguments, "--out", str(tmp_path / "new")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_full_size_without_its_seconds_is_refused_before_a_video_is_made(tiny_assets, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Pipeline, "prepare", lambda *_, **__: pytest.fail("a video"))
    assert main([*SMALL, "--seconds", "a=1", "--of-task", "t2v-A14B", "--out", str(tmp_path / "new")]) == 2
    assert "need --forward-seconds" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "=", "a", "a=", "=3", "a=0", "a=-0.0", "a=-1", "a=nan", "a=x", "a b=1", "a/b=1"])
def test_a_preset_without_a_name_or_a_number_above_zero_is_refused(text):
    with pytest.raises(OptionError, match="balanced=100"):
        named(text)


def test_a_preset_has_a_name_and_a_number():
    assert named("fast-2_b=0.5") == ("fast-2_b", 0.5) and named("1=40") == ("1", 40.0)


def test_sizes_of_videos():
    assert size_of("1280x720x81") == (1280, 720, 81) and size_of("64x48x5") == (64, 48, 5)
    for text in ("", "1280x720", "1280", "1280x720x", "x720x81", "1280x720x8.5", "1280x720x-5"):
        with pytest.raises(OptionError, match="write WIDTHxHEIGHT"):
            size_of(text)


# --------------------------------------------------------------------------------------------------------------- files


def test_the_presets_of_this_package_are_found_and_save_what_they_say():
    assert speed_names()[:3] == ("faithful", "balanced", "fast")
    assert {"searched-balanced", "searched-fast", *RENAMED.values()} <= set(searched_names())
    assert all(find_speed(old).name == new for old, new in RENAMED.items())
    for name in searched_names():
        fields = json.loads((FOLDER / f"{name}{SUFFIX}").read_text())
        check_native(speed_options(name))  # WanCore Accelerate takes it too
        plan = skip_forwards(
            make_plan(task=fields["of"]["task"], steps=fields["of"]["steps"]), speed_options(name), None
        )
        assert plan.forwards == fields["forwards"] < plan.unskipped
        assert find_speed(name).setting == fields["setting"] == read_speed(FOLDER / f"{name}{SUFFIX}").setting


@pytest.mark.parametrize("name", searched_names())
def test_a_preset_file_has_the_seconds_of_its_own_plans(name):
    """Every change of a cost changes what a preset takes: the files say what the search would write today."""
    fields = json.loads((FOLDER / f"{name}{SUFFIX}").read_text())
    plain = make_plan(task=fields["of"]["task"], steps=fields["of"]["steps"])
    size = full_size(find_task(FULL_TASKS[plain.task]), H200_SIZE)
    for row in (fields, *fields["rows"]):
        plan = skip_forwards(plain, parse_setting(row["setting"]), None)
        assert row["seconds"] == pytest.approx(estimated_seconds(plan, *size, H200_FORWARD, H200_BESIDE), rel=0.01)


@pytest.mark.parametrize("name", searched_names())
@pytest.mark.parametrize("steps", [12, 20, 40])
def test_a_plan_says_where_a_preset_was_measured_with_other_steps(name, steps):
    plan = skip_forwards(make_plan(task="i2v-tiny", steps=steps), speed_options(name), None)
    said = [note for note in plan.notes if "was measured with" in note]
    own = find_speed(name).steps
    assert own in (20, 40) and len(said) == (own != steps)
    assert all(f"{own} steps" in note and f"has {steps}:" in note for note in said)


def test_a_part_of_a_schedule_is_not_told_to_set_its_steps():
    """With a denoise of 0.7, 40 steps are the last ones of a schedule of 57."""
    plan = make_plan(task="t2v-tiny", steps=40, window=Window(denoise=0.7))
    note = next(n for n in skip_forwards(plan, speed_options("searched-fast"), None).notes if "was measured with" in n)
    assert "with 40 steps" in note and "has 57:" in note and "set steps" not in note


def test_a_preset_for_any_number_of_steps_says_nothing(tmp_path):
    path = tmp_path / f"any{SUFFIX}"
    path.write_text('{"format": "wancore-preset/1", "name": "any", "setting": "pattern:1101/101/1", "source": "b"}')
    assert not skip_forwards(make_plan(steps=12), speed_options(str(path)), None).notes


def test_steps_of_a_preset_are_said_before_loading(tmp_path, capsys):
    arguments = ["generate", "--model", "tiny", "--prompt", "a red circle moving right on a blue background"]
    arguments += ["--speed", "searched-balanced", "--steps", "10", "--frames", "5", "--size", "32x32"]
    assert main([*arguments, "--out", str(tmp_path / "x.mp4")]) == 0
    told = capsys.readouterr().err
    assert told.count("measured with 40 steps, and this run has 10") == 1
    assert told.index("measured with 40 steps") < told.index("load ")


DAMAGED = {
    "steps that are no number": '{"format": "wancore-preset/1", "name": "a", "setting": "full", "source": "b",'
    ' "of": {"steps": "20"}}',
    "no json": "{",
    "no preset": "[]",
    "another form": '{"format": "wancore-preset/9", "name": "a", "setting": "full", "source": "b"}',
    "no setting": '{"format": "wancore-preset/1", "name": "a", "source": "b"}',
    "a number": '{"format": "wancore-preset/1", "name": "a", "setting": 3, "source": "b"}',
    "an unknown setting": '{"format": "wancore-preset/1", "name": "a", "setting": "fly:1", "source": "b"}',
    "itself": '{"format": "wancore-preset/1", "name": "a", "setting": "speed:balanced", "source": "b"}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_preset_is_refused_in_words(text, tmp_path):
    path = tmp_path / f"x{SUFFIX}"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"x\.preset\.json"):
        speed_options(str(path))


def test_names_that_are_no_presets(tmp_path, capsys):
    with pytest.raises(OptionError, match="balanced"):
        speed_options("quick")
    with pytest.raises(OptionError, match="balanced"):
        speed_options(str(tmp_path / f"missing{SUFFIX}"))
    assert main(["plan", "--speed", "balanced", "--sparse", "fast"]) == 2
    assert "--sparse" in capsys.readouterr().err
