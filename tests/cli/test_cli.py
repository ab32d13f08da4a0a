"""The command line from end to end, on the embedded model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from wan_core.checkpoint.latents import load_latents
from wan_core.cli import main
from wan_core.media.video import read_metadata, read_video
from wan_core.pipeline import pipeline as pipeline_module

CAPTION = "a red circle moving right on a blue background"
FAST = ["--model", "tiny", "--steps", "2", "--frames", "5", "--size", "64x48", "--device", "cpu"]


def test_generate_writes_video_latents_and_report(tmp_path, capsys):
    out, latents, report = tmp_path / "x.mp4", tmp_path / "keep.safetensors", tmp_path / "x.json"
    arguments = [
        "generate",
        *FAST,
        "--prompt",
        CAPTION,
        "--seed",
        "3",
        "--solver",
        "dpm++",
        "--guidance-low",
        "1",
        "--out",
        str(out),
    ]
    sheet = tmp_path / "x.png"
    assert main([*arguments, "--save-latents", str(latents), "--report", str(report), "--sheet", str(sheet)]) == 0
    with Image.open(sheet) as picture:
        assert picture.size == (5 * (2 * 64 + 4) - 4, 2 * 48)
    frames = read_video(out)
    assert frames.shape == (5, 48, 64, 3)
    settings = read_metadata(out)
    assert settings["prompt"] == CAPTION and settings["seed"] == "3" and settings["solver"] == "dpm++"
    phases = json.loads(report.read_text())["phases"]
    assert {"load", "text", "denoise high", "denoise low", "decode", "write"} <= phases.keys()
    assert phases["denoise high"]["steps"] + phases["denoise low"]["steps"] == 2
    stored, fps, _ = load_latents(latents)
    assert stored.shape == (1, 16, 2, 6, 8) and fps == 8
    printed = capsys.readouterr()
    assert "step   2/2" in printed.err and "s/step" in printed.err and "total" in printed.out

    again = tmp_path / "again.mp4"  # the kept latents make the same video
    assert main(["decode", str(latents), "--model", "tiny", "--device", "cpu", "--out", str(again)]) == 0
    # To a small difference: x264's threads do not always choose alike on a busy machine.
    assert np.abs(read_video(again).astype(int) - frames).mean() < 1 and read_metadata(again) == settings


def test_a_long_prompt_is_truncated_like_the_reference(tmp_path):
    arguments = ["generate", *FAST, "--prompt", CAPTION + " and " + CAPTION * 20, "--out", str(tmp_path / "x.mp4")]
    assert main(arguments) == 0


def test_same_seed_same_video_and_batched_guidance_agrees(tmp_path):
    def latents(*more):
        path = tmp_path / "l.safetensors"
        assert (
            main(
                [
                    "generate",
                    *FAST,
                    "--prompt",
                    CAPTION,
                    "--out",
                    str(tmp_path / "x.mp4"),
                    "--save-latents",
                    str(path),
                    "--overwrite",
                    *more,
                ]
            )
            == 0
        )
        return load_latents(path)[0].clone()

    first = latents("--guidance-mode", "sequential")
    assert torch.equal(first, latents("--guidance-mode", "sequential"))
    assert not torch.equal(first, latents("--seed", "1"))
    assert torch.allclose(first, latents("--guidance-mode", "batched"), atol=1e-3)


def test_image_to_video_follows_the_aspect_of_the_image(tmp_path):
    image = tmp_path / "first.png"
    Image.new("RGB", (200, 100), (25, 105, 230)).save(image)
    out = tmp_path / "x.mp4"
    arguments = [
        "generate",
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--steps",
        "2",
        "--frames",
        "5",
        "--image",
        str(image),
    ]
    assert main([*arguments, "--prompt", CAPTION, "--out", str(out)]) == 0
    frames = read_video(out)
    assert frames.shape == (5, 64, 128, 3)


def test_latents_survive_a_failed_decode(tmp_path, monkeypatch, capsys):
    """After a failed decode the finished latents are on disk, and the message says how to use them."""

    def broken(*_):
        raise torch.cuda.OutOfMemoryError("decode did not fit")

    monkeypatch.setattr(pipeline_module, "decode_latents", broken)
    out = tmp_path / "x.mp4"
    assert main(["generate", *FAST, "--prompt", CAPTION, "--out", str(out)]) == 3
    monkeypatch.undo()
    kept, message = tmp_path / "x.latents.safetensors", capsys.readouterr().err
    assert kept.exists() and not out.exists() and str(kept) in message and "out of memory" in message
    assert main(["decode", str(kept), "--model", "tiny", "--device", "cpu", "--out", str(out)]) == 0
    assert len(read_video(out)) == 5


def test_latents_of_an_earlier_failure_are_not_overwritten(tmp_path):
    kept = tmp_path / "x.latents.safetensors"
    kept.write_bytes(b"what the last run could not decode")
    assert main(["generate", *FAST, "--prompt", CAPTION, "--out", str(tmp_path / "x.mp4")]) == 0
    assert kept.read_bytes() == b"what the last run could not decode"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.latents.safetensors", "x.mp4"]


def test_latents_are_deleted_without_save_latents(tmp_path):
    assert main(["generate", *FAST, "--prompt", CAPTION, "--out", str(tmp_path / "x.mp4")]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.mp4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "100x96"], "multiples of 16"),
        (["--frames", "16"], "4n + 1"),
        (["--frames", "0"], "4n + 1"),
        (["--size", "0x0"], "multiples of 16"),
        (["--report", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["--sheet", "/nowhere/x.png"], "cannot write /nowhere/x.png"),
        (["--save-latents", "/nowhere/x.safetensors"], "cannot write /nowhere"),
        (["--device", "meta"], "not supported"),
        (["--model", "random:t2v-A14B", "--vae", "README.md"], "leave out --vae"),
        (["--steps", "0"], "1 to 1000"),
        (["--seed", "-1"], "0 to 2^64"),
        (["--boundary", "900"], "from 0 to 1"),
        (["--guidance", "3", "--guidance-low", "2"], "omit it, or omit --guidance-high"),
        (["--attention", "flash9"], "use one of: auto"),
        (["--device", "cuda:99"], "sees"),
        (["--out", "x.avi"], ".mp4"),
        (["--out", "/nowhere/at/all/x.mp4"], "Create the folder"),
        (["--image", "missing.png"], "missing.png"),
        (["--last-image", "docs/demo.png", "--task", "t2v-tiny"], "takes no image"),
        (["--high", "tests/cli/test_cli.py"], "test_cli.py"),
        (["--vae", "wan_core/assets/tiny/t2v_high.safetensors"], "a Wan VAE is expected"),
        (["--model", "/nowhere"], "there is no folder"),
        (["--model", "random:t2v-99B"], "use one of"),
        (["--task", "i2v-A14B", "--high", "wan_core/assets/tiny/t2v_high.safetensors"], "needs 36 input channels"),
    ],
)
def test_bad_input_is_one_readable_line_before_work(arguments, message, tmp_path, capsys):
    base = ["generate", "--model", "tiny", "--prompt", CAPTION, "--device", "cpu", "--out", str(tmp_path / "x.mp4")]
    assert main([*base, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err and err.strip().count("\n") == 0, err
    assert not list(tmp_path.iterdir())


def test_plan_as_json(capsys):
    assert main(["plan", "--task", "t2v-A14B", "--steps", "40", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["forwards"] == 80 and sum(s["expert"] == "high" for s in plan["steps"]) == 26
    assert (
        plan["steps"][0] | {"timestep": 999.0, "expert": "high", "guidance": 4.0, "action": "compute"}
        == plan["steps"][0]
    )
    assert plan["steps"][0]["branches"] == ["cond", "uncond"]


def test_doctor_tests_every_usable_backend(capsys):
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["attention"]["sdpa"]["usable"] and found["attention"]["sdpa"]["error"] < 1e-5
    assert not found["attention"]["cudnn"]["usable"] and "GPU" in found["attention"]["cudnn"]["why_not"]
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "sdpa" in capsys.readouterr().out


def test_bench_writes_comparable_rows(tmp_path):
    out = tmp_path / "bench.json"
    arguments = [
        "bench",
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--size",
        "64x48x5",
        "--runs",
        "1",
    ]
    assert (
        main(
            [
                *arguments,
                "--setting",
                "forward",
                "--setting",
                "diffusers",
                "--setting",
                "attention:math",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    result = json.loads(out.read_text())
    assert [r["name"] for r in result["rows"]] == ["forward", "diffusers", "attention:math"]
    assert all(r["error"] < 1e-4 and r["seconds"] > 0 for r in result["rows"])


def test_video_to_video_and_nag(tmp_path, capsys):
    before, after = tmp_path / "before.mp4", tmp_path / "after.mp4"
    few = ["--model", "tiny", "--device", "cpu", "--solver", "euler", "--guidance", "1", "--prompt", CAPTION]
    assert main(["generate", *few, "--steps", "2", "--frames", "9", "--size", "64x48", "--out", str(before)]) == 0
    base = ["generate", *few, "--out", str(after)]
    made = [*base, "--steps", "3", "--from-video", str(before), "--denoise", "0.5", "--nag", "5/2/0.5"]
    assert main([*made, "--negative-prompt", "a green square"]) == 0
    settings = read_metadata(after)
    assert read_video(after).shape == (9, *read_video(after).shape[1:]), "as many frames as the video has"
    assert settings["denoise"] == "0.5" and settings["nag"] == "5/2/0.5" and settings["video"] == str(before)
    capsys.readouterr()
    for arguments, words in [
        (["--denoise", "0.5"], "give --from-video as well"),
        (["--from-video", str(before), "--denoise", "1"], "nothing of the video stays"),
        (["--from-video", str(before), "--denoise", "0.95", "--steps", "4"], "leaves nothing of the video"),
        (["--from-video", str(before), "--frames", "13"], "has 9 frames, and 13 are asked for"),
        (["--from-video", str(tmp_path / "none.mp4")], "none.mp4"),
        (["--guidance-high", "3", "--guidance-low", "3", "--nag", "5"], "every step has guidance"),
    ]:
        given = (
            base if "--guidance-high" not in arguments else [word for word in base if word not in ("--guidance", "1")]
        )
        assert main([*given, *arguments]) == 2
        assert words in capsys.readouterr().err, arguments


def test_plans_of_parts(capsys):
    base = ["plan", "--task", "t2v-A14B", "--steps", "20", "--solver", "heun"]
    assert main([*base, "--denoise", "0.5"]) == 0
    assert "20 steps from sigma 0.92" in capsys.readouterr().out
    assert main([*base, "--start-step", "5", "--end-step", "10", "--leftover-noise", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["steps"]) == 10 and len(plan["before"]) == 10 and plan["steps"][-1]["sigma_next"] > 0.9
    assert main([*base, "--start-step", "20"]) == 2
