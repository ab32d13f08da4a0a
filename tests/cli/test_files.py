"""The files of the command line: what it refuses to write, what it keeps, and what is left when a disk is full."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import forked
from tools.processes import below
from wan_core.cli import generate, main
from wan_core.cli.generate import VideoWriting
from wan_core.cli.progress import ProgressLine
from wan_core.media.video import read_video
from wan_core.pipeline import pipeline as pipeline_module
from wan_core.pipeline.sources import TINY

ROOT = Path(__file__).resolve().parents[2]
CAPTION = "a red circle moving right on a blue background"
MODEL = ["--model", "tiny", "--steps", "2", "--frames", "5", "--size", "64x48", "--device", "cpu"]
GENERATE = ["generate", *MODEL, "--prompt", CAPTION]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_existing_files_get_a_number_or_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "x.mp4", tmp_path / "x.json"
    files = ["--out", str(out), "--report", str(report)]
    assert main([*GENERATE, *files]) == 0
    before = contents(tmp_path)
    capsys.readouterr()
    assert main([*GENERATE, *files, "--seed", "5"]) == 0
    said = capsys.readouterr()
    assert said.out.strip().endswith("x-1.mp4") and "x.mp4 exists" in said.err
    after = contents(tmp_path)
    assert sorted(after) == ["x-1.json", "x-1.mp4", "x.json", "x.mp4"]
    assert {name: after[name] for name in before} == before
    assert main([*GENERATE, *files, "--seed", "5", "--overwrite"]) == 0
    assert sorted(contents(tmp_path)) == sorted(after)
    assert np.array_equal(read_video(out), read_video(tmp_path / "x-1.mp4"))


def test_calibrate_keeps_the_older_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("t2v_high", "t2v_low"):
        shutil.copy(TINY / f"{name}.safetensors", tmp_path)
    curve = tmp_path / "t2v_high.magcache.json"
    curve.write_text("tuned by hand")
    files = ["--high", str(tmp_path / "t2v_high.safetensors"), "--low", str(tmp_path / "t2v_low.safetensors")]
    others = [f"--{name.replace('_', '-')}={TINY / name}.safetensors" for name in ("vae", "text_encoder")]
    small = ["--task", "t2v-A14B", "--steps", "4", "--size", "32x32", "--frames", "5", "--count", "1", "--prompt", "x"]
    assert main(["calibrate", *files, *others, *small, "--device", "cpu"]) == 0
    assert "kept as" in capsys.readouterr().err
    assert (tmp_path / "t2v_high.magcache.json.bak").read_text() == "tuned by hand"
    assert json.loads(curve.read_text())["format"]


# ------------------------------------------------------------------------------------------------------ full disks


def limited(arguments: list[str], limit: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line with no file above `limit` bytes, as on a disk with so much room."""
    return forked.run(
        [sys.executable, "-m", "wan_core", *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )


def test_latents_that_do_not_fit_do_not_end_the_run(tmp_path: Path) -> None:
    """Latents of 26 kB and a video of less, and room for 20 kB."""
    larger = [*GENERATE, "--size", "128x96"]
    run = limited([*larger, "--out", "x.mp4", "--save-latents", "l.safetensors"], 20_000, tmp_path)
    assert run.returncode == 1, run.stderr  # the video is complete, what else was asked for is not
    assert "the finished latents could not be kept in l.safetensors: File too large" in run.stderr
    assert "Traceback" not in run.stderr and "note: the finished latents could not be kept" in run.stdout
    assert list(contents(tmp_path)) == ["x.mp4"] and len(read_video(tmp_path / "x.mp4")) == 5
    run = limited([*larger, "--out", "y.mp4"], 20_000, tmp_path)  # nobody asked for the latents
    assert run.returncode == 0 and "could not be kept" in run.stderr
    assert list(contents(tmp_path)) == ["x.mp4", "y.mp4"]


def test_a_video_goes_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is gone when it is complete: it is written into the folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Made:
        frames, fps = np.zeros((5, 48, 64, 3), dtype=np.uint8), 8
        report = pipeline_module.Report(torch.device("cpu"))

    for folder in ("gone", "/dev/null"):
        writing, taken = VideoWriting(Path(tmp_path, folder, "x.mp4"), ProgressLine(), None, Path), iter(Made.frames)
        writing.write(taken, fps=8, settings={"frames": 5})
        assert writing.fault is not None and f"to {writing.path}" in writing.fault
        path = writing.elsewhere(Made())
        assert path.parent == tmp_path and len(read_video(path)) == 5
    assert sorted(contents(tmp_path)) == ["x-1.mp4", "x.mp4"]


def test_files_that_came_while_the_video_was_made_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files have the names of the video and of its report; --overwrite replaces them."""
    watching, mine = generate.watching, {name: tmp_path / name for name in ("x.mp4", "x.json")}

    def step(*_: object) -> None:
        for path in mine.values():
            path.write_text("of the user")

    monkeypatch.setattr(generate, "watching", lambda *given: replace(watching(*given), step=step))
    words = [*GENERATE, "--out", str(mine["x.mp4"]), "--report", str(mine["x.json"])]
    assert main(words) == 0
    said = capsys.readouterr()
    assert [path.read_text() for path in mine.values()] == ["of the user"] * 2
    assert sorted(contents(tmp_path)) == ["x-1.json", "x-1.mp4", "x.json", "x.mp4"]
    assert said.out.endswith(f"{tmp_path / 'x-1.mp4'}\n") and said.err.count("exists or is being written") == 2
    assert main([*words, "--overwrite"]) == 0
    assert len(read_video(mine["x.mp4"])) == 5 and len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("out_given", [False, True])
def test_the_printed_command_makes_the_video(
    out_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failed decode: names with spaces and quotes; the VAE as it was given, and a video to replace. A shell
    reads the command; once it starts it, too."""

    def broken(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("decode did not fit")

    monkeypatch.setattr(pipeline_module, "decode_latents", broken)
    folder = tmp_path / "it's a $HOME; folder"
    folder.mkdir()
    arguments = [*GENERATE, "--out", str(folder / "my video.mp4")]
    if out_given:
        shutil.copy(TINY / "vae.safetensors", folder / "my vae.safetensors")
        arguments += ["--vae", str(folder / "my vae.safetensors"), "--vae-precision", "fp32"]
        (folder / "my video.mp4").write_text("old")
        arguments += ["--overwrite"]
    assert main(arguments) == 3
    monkeypatch.undo()
    said = capsys.readouterr().err
    assert "out of memory" in said and (folder / "my video.latents.safetensors").exists()
    command = next(line for line in said.splitlines() if " decode " in line)
    assert ("--vae-precision fp32" in command) == out_given and str(folder / "my video.latents.safetensors") in said
    if out_given:
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True)  # it works in any folder
    else:
        parsed = subprocess.check_output(f"printf '%s\\0' {command}", shell=True, text=True).split("\0")[:-1]
        python, program, *arguments = parsed
        assert python == sys.executable and Path(program).is_dir()
        assert forked.run([python, "-m", Path(program).name, *arguments], cwd=tmp_path).returncode == 0
    assert len(read_video(folder / "my video.mp4")) == 5


def test_no_rank_starts_for_a_request_that_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    others = below(os.getpid())
    base = ["generate", "--model", "tiny", "--prompt", CAPTION, "--gpus", "cpu,cpu", "--out", str(tmp_path / "x.mp4")]
    for options, message in (("--steps 0", "1 to 1000"), ("--high gone.safetensors", "gone.safetensors")):
        assert main([*base, *options.split()]) == 2
        assert message in capsys.readouterr().err and below(os.getpid()) <= others
        assert not contents(tmp_path)
