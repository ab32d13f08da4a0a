"""Curves of MagCache: options that write the same, files beside checkpoints, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.sampling.test_magcache import CURVES
from wan_core.cli import main
from wan_core.config import (
    MagCacheOptions,
    OptionError,
    SkipOptions,
)
from wan_core.config.skipping import parse_setting
from wan_core.sampling.cache.curves import curve_path, find_curve, read_curve, write_curve
from wan_core.sampling.cache.skipping import leave_out, skip_forwards
from wan_core.sampling.plan import make_plan


def test_ways_to_write_the_same():
    assert (
        MagCacheOptions.parse("0.12/2/0.2") == MagCacheOptions.parse("E012K2R20") == MagCacheOptions.parse("e012k2r20")
    )
    for bad in ("", "0.12", "0.1/2", "slow", "0.1/x/0.2", "1.2.3/2/0.2", "99/2/0.2", "0.1/2/1.5"):
        with pytest.raises(OptionError, match=r"write |allowed are"):
            MagCacheOptions.parse(bad)


def test_it_switches_itself_off_and_says_so(tmp_path):
    options = SkipOptions(magcache=MagCacheOptions.parse("0.24/2/0.1"))
    few = leave_out(make_plan(steps=9), options, CURVES["t2v-A14B"])
    assert few.saved == 0 and "fewer than 10" in few.table()
    assert leave_out(make_plan(steps=10), options, CURVES["t2v-A14B"]).saved > 0
    plain, fast = tmp_path / "high_noise_14B_fp8.safetensors", tmp_path / "wan_4steps_high.safetensors"
    assert skip_forwards(make_plan(steps=20), options, plain, plain).saved > 0
    for high, low in ((fast, plain), (plain, fast), (fast, fast)):
        plan = skip_forwards(make_plan(steps=20), options, high, low)
        assert plan.saved == 0 and "step-distilled" in plan.notes[0] and "wan_4steps_high" in plan.notes[0]


def test_a_curve_beside_the_checkpoint_comes_first(tmp_path):
    checkpoint = tmp_path / "wan2.2_t2v_high_noise_14B_fp16.safetensors"
    assert find_curve(checkpoint, "t2v-A14B") == CURVES["t2v-A14B"]
    assert find_curve(None, "ti2v-5B", image=True) == CURVES["ti2v-5B-image"]
    assert find_curve(checkpoint, "unknown") is None
    mine = replace(CURVES["t2v-A14B"], source="mine", cond=(0.5,) * 40)
    path = write_curve(mine, curve_path(checkpoint, "t2v-A14B"))
    assert path.name == "wan2.2_t2v_high_noise_14B_fp16.magcache.json"
    assert find_curve(checkpoint, "t2v-A14B") == mine
    folder = tmp_path / "high_noise_model"
    folder.mkdir()
    write_curve(mine, curve_path(folder, "t2v-A14B"))
    assert find_curve(folder, "t2v-A14B") == mine
    with pytest.raises(OptionError, match="calibrate"):
        leave_out(make_plan(), SkipOptions(magcache=MagCacheOptions.parse("0.1/2/0.1")), None)


def test_without_a_curve_magcache_says_what_needs_none(capsys):
    assert main(["plan", "--task", "t2v-14B", "--steps", "20", "--magcache", "0.12/2/0.2"]) != 0
    assert "use taylorseer or a word of speed, which need none" in capsys.readouterr().err


def test_models_in_one_folder_have_curves_of_their_own(tmp_path):
    """Names as ComfyUI's, with a dot in the version, and TI2V with and without an image."""
    models = [
        ("wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "t2v-A14B", False),
        ("wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", "i2v-A14B", True),
        ("wan2.2_ti2v_5B_fp16.safetensors", "ti2v-5B", False),
        ("wan2.2_ti2v_5B_fp16.safetensors", "ti2v-5B", True),
        ("Wan2.2-TI2V-5B-Q8_0.gguf", "ti2v-5B", False),
        ("diffusion_pytorch_model.safetensors.index.json", "t2v-A14B", False),
    ]
    written = {}
    for name, task, image in models:
        mine = replace(CURVES["ti2v-5B"], task=f"{task}-image" if image and task == "ti2v-5B" else task, source=name)
        path = write_curve(mine, curve_path(tmp_path / name, task, image=image))
        assert path not in written and path.parent == tmp_path
        written[path] = mine
    for (name, task, image), mine in zip(models, written.values(), strict=True):
        assert find_curve(tmp_path / name, task, image=image) == mine


def test_a_curve_of_another_task_is_refused(tmp_path):
    checkpoint = tmp_path / "wan2.2_t2v.safetensors"
    write_curve(CURVES["ti2v-5B"], curve_path(checkpoint, "t2v-A14B"))
    with pytest.raises(OptionError, match="curve of ti2v-5B, and the model is t2v-A14B"):
        find_curve(checkpoint, "t2v-A14B")
    # without one for images, that of the same weights without an image is the next best; the reverse is another model
    assert find_curve(checkpoint, "ti2v-5B", image=True) == CURVES["ti2v-5B"]
    write_curve(CURVES["ti2v-5B-image"], curve_path(checkpoint, "ti2v-5B"))
    with pytest.raises(OptionError, match="ti2v-5B-image"):
        find_curve(checkpoint, "ti2v-5B")


GOOD = {
    "format": "wancore-magcache-curve/1", "task": "t2v-A14B", "source": "x", "high_steps": 1, "shift": 5,
    "boundary": 0.9, "solver": "unipc", "samples": None, "cond": [1, 0.9, 0.9], "uncond": [1, 0.9, 0.9],
}  # fmt: skip

BAD = [
    {"cond": [1]}, {"cond": [1, True, 0.9]}, {"cond": [1, "x", 0.9]}, {"cond": [1, 10**400, 0.9]}, {"cond": "abc"},
    {"cond": {"a": 1}}, {"cond": None}, {"high_steps": 26.5}, {"high_steps": True}, {"high_steps": "1"},
    {"high_steps": -1}, {"shift": "x"}, {"shift": 10**400}, {"shift": None}, {"boundary": [1]}, {"task": 5},
    {"source": None}, {"solver": {}}, {"samples": 1.5}, {"samples": False}, {"format": 3}, {"more": 1},
]  # fmt: skip

TEXTS = ["", "[]", "{}", "1", "null", "[" * 100_000, '{"format":' * 50_000, json.dumps(GOOD | {"shift": float("nan")})]


@pytest.mark.parametrize("text", [*TEXTS, *(json.dumps(GOOD | bad) for bad in BAD)], ids=lambda text: text[-40:])
def test_a_damaged_curve_is_refused(tmp_path, text):
    path = tmp_path / "x.magcache.json"
    path.write_text(json.dumps(GOOD))
    assert read_curve(path).cond == (1, 0.9, 0.9)
    path.write_text(text)
    with pytest.raises(OptionError, match="calibrate"):
        read_curve(path)


def test_plan_knows_images_and_refuses_a_file_that_is_not_there(tmp_path, capsys):
    command = ["plan", "--task", "ti2v-5B", "--magcache", "0.06/2/0.2", "--json"]
    reports = []
    for more in ([], ["--image"]):
        assert main([*command, *more]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    for image, said in zip((False, True), reports, strict=True):
        plan = skip_forwards(make_plan(task="ti2v-5B"), parse_setting("magcache:0.06/2/0.2"), None, image=image)
        assert said == json.loads(json.dumps(plan.as_dict()))
    assert reports[0]["unskipped"] == 100 and reports[0]["forwards"] != reports[1]["forwards"]
    for option in ("--high", "--low"):
        assert main([*command, option, str(tmp_path / "typo.safetensors")]) == 2
        assert "does not exist" in capsys.readouterr().err
