"""Calibration and the comparison with the full run, on the embedded model; measures and pictures on drawn clips."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.sampling.test_denoise import EXPERTS, NOISE, TEXT
from wan_core.cli import main
from wan_core.config import MagCacheOptions, SkipOptions
from wan_core.config.skipping import parse_setting
from wan_core.media.video import read_video
from wan_core.models.wan.runners import BlockInputs, ForwardInfo
from wan_core.pipeline.embedded import parse_caption
from wan_core.pipeline.sources import TINY
from wan_core.sampling.cache.curves import read_curve
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.plan import make_plan
from wan_lab.calibrate import calibrate, record
from wan_lab.compare import compare, gmsd, summary
from wan_lab.samples import choose_samples
from wan_lab.shapes import draw, held_out

SMALL = ["--model", "tiny", "--device", "cpu", "--steps", "10", "--frames", "5", "--size", "64x48"]
CAPTION = "a red circle moving right on a blue background"


def clip(caption: str = CAPTION, seed: int = 3) -> torch.Tensor:
    """uint8 [F, H, W, 3]."""
    return ((draw([parse_caption(caption)], seed=seed)[0] + 1) * 127.5).round().byte().permute(1, 2, 3, 0)


# --------------------------------------------------------------------------------------------------------- calibration


@torch.no_grad()
def test_recorded_ratios_are_those_of_the_residuals():
    """Against residuals taken apart by hand, both branches, with the expert's change in the middle."""
    plan = make_plan(steps=8, solver="euler")
    ratios = record(plan, EXPERTS.__getitem__, TEXT, NOISE)
    x, last = NOISE, {}
    for step in plan.steps:
        model, t, velocities = EXPERTS[step.expert], torch.tensor([step.timestep]), {}
        for branch in ("cond", "uncond"):
            grid = model.token_grid(x)
            tokens, (time, modulation) = model.embed_patches(x), model.embed_time(t)
            text = model.prepare_text(getattr(TEXT, branch))
            block_inputs = (tokens, modulation, model.rope(grid, x.device), text, ForwardInfo(), grid)
            after = model.run_blocks(BlockInputs(*block_inputs))
            norm = (after - tokens).norm(dim=-1)
            if branch in last:
                assert ratios[step.index, branch] == pytest.approx(float((norm / last[branch]).mean()), rel=1e-3)
            last[branch] = norm
            velocities[branch] = model.unpatchify(model.head(after, time), grid)
        velocity = velocities["uncond"] + step.guidance * (velocities["cond"] - velocities["uncond"])
        x = x + velocity * (step.sigma_next - step.sigma)
    assert all(model.runners.runners == [] for model in EXPERTS.values()), "the recorder is gone"
    curve = calibrate(plan, [ratios, {k: v + 0.2 for k, v in ratios.items()}], "test", [3, 1])
    assert curve.high_steps == 6 and curve.samples == 4
    assert curve.cond[3] == pytest.approx(ratios[3, "cond"] + 0.05), "every video counts the same, not every batch"
    assert all(math.isfinite(r) for r in (*curve.cond, *curve.uncond))


def test_calibrate_writes_a_curve_that_is_found_again(tmp_path, capsys):
    out = tmp_path / "my.magcache.json"
    command = ["calibrate", *SMALL, "--count", "3", "--batch", "2", "--out", str(out)]
    assert main(command) == 0
    curve = read_curve(out)
    assert (curve.task, curve.steps, curve.samples, curve.solver) == ("t2v-tiny", 10, 3, "unipc")
    assert all(0.3 < r < 3 for r in (*curve.cond, *curve.uncond)) and curve.cond != curve.uncond
    printed = capsys.readouterr().out
    assert "0.12/2/0.2" in printed and "forwards" in printed
    shutil.copy(TINY / "t2v_high.safetensors", tmp_path / "my.safetensors")
    assert (
        main(["plan", "--task", "t2v-tiny", "--magcache", "0.24/2/0.1", "--high", str(tmp_path / "my.safetensors")])
        == 0
    )
    assert "saved" in capsys.readouterr().out


@torch.no_grad()
def test_a_video_begins_anew_in_calibration():
    """Delayed scales of Transformer Engine may not go from one video into the next."""
    fresh = []
    plan = make_plan(steps=4, solver="euler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wan_lab.calibrate.begin_run", fresh.append)
        record(plan, EXPERTS.__getitem__, TEXT, NOISE)
    assert fresh == [EXPERTS[phase[0].expert] for phase in plan.phases]


@pytest.mark.parametrize("task", ["t2v-tiny", "i2v-tiny"])
def test_the_embedded_model_brings_its_own_curve(task, tiny_assets):
    curve = read_curve(tiny_assets / f"{task}.magcache.json")
    assert curve.task == task and curve.steps == 40 and curve.samples
    assert curve.high_steps == sum(s.expert == "high" for s in make_plan(task=task, steps=40).steps)
    plan = make_plan(task=task, steps=40)
    options = [SkipOptions(magcache=MagCacheOptions.parse(one)) for one in ("0.06/1/0.2", "0.24/1/0.1", "0.24/2/0.1")]
    saved = [leave_out(plan, one, curve).saved for one in options]
    assert saved == sorted(saved) and saved[1] >= 0.25 and saved[2] >= 0.35


# ------------------------------------------------------------------------------------------------------------- quality


def test_quality_compares_with_the_full_run(tmp_path, capsys):
    out, plot, video = tmp_path / "q.json", tmp_path / "q.png", tmp_path / "q.mp4"
    settings = ["full", "magcache:0/2/0.2", "taylorseer:2", "taylorseer:3"]
    command = ["quality", *SMALL, "--count", "2", "--batch", "2", "--out", str(out), "--plot", str(plot)]
    for setting in settings:
        command += ["--setting", setting]
    assert main([*command, "--video", str(video)]) == 0
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == settings and result["suite"] == "quality" and result["perceptual"] in ("gmsd", "lpips")
    for exact in ("full", "magcache:0/2/0.2"):
        assert rows[exact]["psnr"] == 99 and rows[exact]["ssim"] == 1 and rows[exact]["saved"] == 0
    for lossy in settings[2:]:
        assert rows[lossy]["psnr"] < 60 and 0.1 < rows[lossy]["saved"] < 0.8 and rows[lossy]["forwards"] < 20
        assert rows[lossy]["psnr_worst"] <= rows[lossy]["psnr"] and 0 <= rows[lossy]["truth"] <= 1
    assert "taylorseer:2" in capsys.readouterr().out
    with Image.open(plot) as picture:
        assert picture.size == (960, 600)
    assert read_video(video).shape[0] == 5


@torch.no_grad()
@pytest.mark.parametrize("setting", ["magcache:0.24/2/0.1", "sparse:0.8125"])
def test_a_setting_is_planned_as_by_every_door(tiny_assets, setting):
    """With all else that the request has: its negative prompt counts in the steps that guidance leaves out."""
    from wan_core.config import LoadOptions, NagOptions, Request
    from wan_core.pipeline.pipeline import Pipeline
    from wan_lab.samples import batches

    pipe, skip = Pipeline.load(LoadOptions(model="tiny", device="cpu")), parse_setting(setting)
    base = Request(prompt="", steps=12, frames=5, width=64, height=48, guidance_low=1.0, nag=NagOptions())
    [sample] = choose_samples(None, 1, 0, tiny=True)
    [batch] = batches(pipe, base, [sample], 1)
    asked = dataclasses.replace(base, prompt=sample.caption, seed=sample.seed, skip=skip)
    planned = pipe.prepare(asked).job.plan
    assert dataclasses.replace(batch.job.plan_with(skip), guidance_mode=planned.guidance_mode) == planned
    assert planned != batch.job.plan


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--setting", "turbo"], "not known"),
        (["--setting", "magcache:0.1"], "0.12/2/0.2"),
        (["--setting", "magcache:0.24/2/0.1:order7"], "0.12/2/0.2"),
        (["--setting", "magcache:"], "not known"),
        (["--setting", "magcache"], "not known"),
        (["--setting", "taylorseer:"], "not known"),
        (["--setting", "sparse:+magcache:0.24/2/0.1"], "not known"),
        (["--setting", "magcache:0.24/2/0.1+"], "not known"),
        (["--setting", "taylorseer:2+taylorseer:3"], "repeats a part"),
        (["--setting", "taylorseer:2/0.2/9"], "2/0.2"),
        (["--setting", "taylorseer:-1"], "allowed are"),
        (["--setting", "magcache:0.24/2/0.1+taylorseer:2"], "choose one"),
        (["--count", "0"], "at least 1"),
        (["--plot", "/nowhere/x.png"], "cannot write"),
        (["--out", "/nowhere/x.json"], "cannot write"),
        (["--magcache", "0.24/2/0.1"], "measures the full run"),
    ],
)
def test_bad_input_is_one_readable_line(arguments, says, capsys):
    assert main(["quality", *SMALL, "--count", "1", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def test_measures():
    """Equal videos score as equal, and worse ones worse, by every measure."""
    full = clip()
    generator = torch.Generator().manual_seed(0)

    def noisy(strength: float) -> torch.Tensor:
        noise = torch.randn(full.shape, generator=generator) * strength
        return (full.float() + noise).clamp(0, 255).byte()

    same, little, much = (compare(v, full, CAPTION, gmsd) for v in (full, noisy(4), noisy(20)))
    assert (same.psnr, same.flicker, same.truth) == (99, 0, True)
    assert same.ssim == pytest.approx(1) and same.perceptual == pytest.approx(0, abs=1e-5)
    assert same.psnr > little.psnr > much.psnr and same.ssim > little.ssim > much.ssim
    assert same.perceptual < little.perceptual < much.perceptual and little.flicker < much.flicker
    assert compare(full, full, "a green square moving left on a white background", gmsd).truth is False
    assert compare(full, full, "waves break against rocks", gmsd).truth is None
    told = summary([same, much])
    assert told["psnr_worst"] == round(much.psnr, 2) < told["psnr"] < 99 and told["truth"] == (1 + much.truth) / 2


def test_samples_are_new_to_the_embedded_model():
    samples = choose_samples(None, 12, 5, tiny=True)
    assert len({s.caption for s in samples}) == 12 and [s.seed for s in samples] == list(range(5, 17))
    assert all(held_out(parse_caption(s.caption)) for s in samples)
    assert [s.caption for s in choose_samples(["x", "y"], 3, 0, tiny=False)] == ["x", "y", "x"]
    assert len(choose_samples(None, 3, 0, tiny=False)) == 3


@torch.no_grad()
def test_presets_keep_the_video(tiny_assets):
    """One caption in a small size, 20 steps of which every second one is forecast, or uses the last residual again."""
    from wan_core.config import LoadOptions, Request
    from wan_core.pipeline.pipeline import Pipeline
    from wan_lab.run import measure_quality

    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    settings = {name: parse_setting(name) for name in ("taylorseer:2/0.1", "magcache:10/1/0.1")}
    samples = choose_samples(None, 1, 7, tiny=True)
    request = Request(prompt="", steps=20, width=48, height=48, frames=9)
    rows = measure_quality(pipe, request, samples, settings, 1).rows()
    balanced, reuse = rows
    assert balanced["saved"] >= 0.4 and balanced["psnr"] > 35
    assert balanced["psnr"] > reuse["psnr"] + 6, "a forecast is nearer than reuse"


def test_sparse_attention_keeps_a_video_from_an_image(tiny_assets: Path):
    """A first frame that every block reads takes a fifth of what `balanced` reads of this model: 28 dB with it."""
    from wan_core.config import LoadOptions, Request
    from wan_core.pipeline.pipeline import Pipeline
    from wan_lab.run import measure_quality

    pipe = Pipeline.load(LoadOptions(model="tiny", task="i2v-tiny", device="cpu"))
    base, samples = Request(prompt="", steps=6, frames=17), choose_samples(None, 1, 7, tiny=True)
    settings = {"sparse:0.8125": parse_setting("sparse:0.8125")}
    assert measure_quality(pipe, base, samples, settings, 1).rows()[0]["psnr"] > 38
