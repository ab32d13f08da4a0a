"""The command line from end to end, on the embedded model."""

from __future__ import annotations

import json

import numpy as np
from PIL import Image

from wan_core.checkpoint.save import load_latents
from wan_core.cli import main
from wan_core.media.video import read_metadata, read_video

CAPTION = "a red circle moving right on a blue background"
FAST = ["--model", "tiny", "--steps", "2", "--frames", "5", "--size", "64x48", "--device", "cpu"]


def test_generate_writes_video_latents_and_report(tmp_path, capsys):
    out, latents, report = tmp_path / "x.mp4", tmp_path / "keep.safetensors", tmp_path / "x.json"
    arguments = ["generate", *FAST, "--prompt", CAPTION, "--out", str(out)]
    arguments += ["--seed", "3", "--solver", "dpm++", "--guidance", "/1"]
    assert main([*arguments, "--save-latents", str(latents), "--report", str(report)]) == 0
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


def test_image_to_video_follows_the_aspect_of_the_image(tmp_path):
    image = tmp_path / "first.png"
    Image.new("RGB", (200, 100), (25, 105, 230)).save(image)
    out = tmp_path / "x.mp4"
    arguments = ["generate", "--model", "tiny", "--device", "cpu", "--steps", "2", "--frames", "5", "--prompt", CAPTION]
    assert main([*arguments, "--image", str(image), "--out", str(out)]) == 0
    frames = read_video(out)
    assert frames.shape == (5, 64, 128, 3)


def test_video_to_video_and_nag(tmp_path, capsys):
    before, after = tmp_path / "before.mp4", tmp_path / "after.mp4"
    few = ["--model", "tiny", "--device", "cpu", "--solver", "euler", "--guidance", "1", "--prompt", CAPTION]
    assert main(["generate", *few, "--steps", "2", "--frames", "9", "--size", "64x48", "--out", str(before)]) == 0
    base = ["generate", *few, "--out", str(after)]
    base_arguments = [*base, "--steps", "3", "--from-video", str(before), "--denoise", "0.5", "--nag", "5/2/0.5"]
    assert main([*base_arguments, "--negative-prompt", "a green square"]) == 0
    settings = read_metadata(after)
    assert read_video(after).shape == (9, *read_video(after).shape[1:]), "as many frames as the video has"
    assert settings["denoise"] == "0.5" and settings["nag"] == "5/2/0.5" and settings["video"] == str(before)
    capsys.readouterr()
    for arguments, message in [
        (["--denoise", "0.5"], "give --from-video as well"),
        (["--from-video", str(before), "--denoise", "1"], "nothing of the video stays"),
        (["--from-video", str(before), "--denoise", "0.95", "--steps", "4"], "leaves nothing of the video"),
        (["--from-video", str(before), "--frames", "13"], "has 9 frames at 8 frames per second, and 13 are asked for"),
        (["--from-video", str(tmp_path / "none.mp4")], "none.mp4"),
        (["--guidance", "3", "--nag", "5"], "every step has guidance"),
    ]:
        assert main([*base, *arguments]) == 2
        assert message in capsys.readouterr().err, arguments
