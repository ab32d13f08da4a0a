"""Every file that a run leaves for another, damaged in ten ways: it counts as what it was, or for nothing; no wrong
video, nothing else is lost, nothing waits. And kept clips in whole runs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.sampling.test_magcache import CURVES
from wan_core.checkpoint.save import load_latents, save_latents
from wan_core.cli import main
from wan_core.cli.prompt_file import is_finished, set_aside
from wan_core.config import Request, UserError
from wan_core.config.durable import SEAL, UNSEALED
from wan_core.media.mp4 import write_mp4
from wan_core.media.video import read_video
from wan_core.pipeline.clips import remove_kept
from wan_core.pipeline.kept_steps import KeptLatents, Reached
from wan_core.pipeline.pipeline import Pipeline, Result
from wan_core.pipeline.run import Watch
from wan_core.sampling.cache.curves import find_curve, write_curve
from wan_core.sampling.plan import make_plan
from wan_core.workers.video_list import KEY, ListedVideo

REFUSED, ANOTHER = "refused", "another"
LATENTS = torch.arange(1.0, 241).reshape(1, 1, 5, 6, 8)
PLAN = make_plan(steps=2)


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A test that waits for a pipe fails."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------------------------------------------- kinds of files


@dataclass(frozen=True)
class Kind:
    """A kind of file. write(folder, what): the file, for `what` "mine", "swapped" (a file of the same run for something
    else), "another's" (of another run) or "nan"; None where there is none. read: what a later run takes it for, or
    REFUSED, or ANOTHER, where a user names the file and it is what it says. unsealed: without a checksum it counts,
    too."""

    write: Callable[[Path, str], Path | None]
    read: Callable[[Path], Any]
    unsealed: bool = True
    named: bool = False


def write_clip(folder: Path, what: str) -> Path:
    key = ("b" if what == "another's" else "a") * 64
    kept = KeptLatents(folder / what / "clip.latents.safetensors", key, print, int(what == "swapped"))
    kept.write(Reached(len(PLAN.steps), LATENTS * torch.nan if what == "nan" else LATENTS))
    return kept.path


def read_clip(path: Path) -> Any:
    """Also makes the clip again, as a run does, and takes that."""
    warnings: list[str] = []
    kept = KeptLatents(path, "a" * 64, warnings.append)
    found = kept.find(PLAN, tuple(LATENTS.shape))
    if found is None:
        assert len(warnings) == 1 and "clip 1" in warnings[0] and "made again" in warnings[0]
        if kept.write(Reached(len(PLAN.steps), LATENTS)):
            again = KeptLatents(path, "a" * 64, print).find(PLAN, tuple(LATENTS.shape))
            assert again is not None and torch.equal(again.x, LATENTS)
    remove_kept([path])
    return REFUSED if found is None else found.x.tolist()


def write_latents(folder: Path, what: str) -> Path:
    path = folder / "x.latents.safetensors"
    values = {"swapped": LATENTS + 1, "another's": LATENTS + 2, "nan": LATENTS.log() * torch.nan}
    save_latents(path, values.get(what, LATENTS), 8, {"prompt": what})
    return path


def read_latents(path: Path) -> Any:
    latents, _, settings = load_latents(path)
    return latents.tolist() if settings == {"prompt": "mine"} else ANOTHER


def write_kept_curve(folder: Path, what: str) -> Path:
    curve, path = CURVES["t2v-A14B"], folder / "high.magcache.json"
    if what in ("swapped", "another's"):
        curve = CURVES["ti2v-5B" if what == "swapped" else "i2v-A14B"]
    if what == "nan":
        curve = replace(curve)
        object.__setattr__(curve, "cond", (float("nan"), *curve.cond[1:]))
    return write_curve(curve, path)


def write_video(folder: Path, what: str) -> Path | None:
    if what == "nan":
        return None
    frames = np.random.default_rng(0).integers(0, 255, (3, 32, 32, 3), np.uint8)
    key = {"mine": "key", "swapped": "line 2"}.get(what, "another list")
    return write_mp4(folder / "x.mp4", frames, fps=8, metadata={"prompt": "a", KEY: key, SEAL: UNSEALED})


def read_listed(path: Path) -> Any:
    """Where it is damaged, it gets another name, and the video can be made."""
    video = ListedVideo(1, Request(prompt="a"), path, "key")
    if is_finished(video):
        return "mine"
    damaged = path.read_bytes()
    words = set_aside(video)
    assert words is not None and "does not fit its checksum" in words and "made again" in words
    assert path.with_name("x.mp4.bak").read_bytes() == damaged and not is_finished(video)
    video.check_free()
    return REFUSED


KINDS = {
    "clip": Kind(write_clip, read_clip, unsealed=False),
    "latents": Kind(write_latents, read_latents, unsealed=False, named=True),
    "curve": Kind(write_kept_curve, lambda path: find_curve(path.with_name("high.safetensors"), "t2v-A14B")),
    "listed video": Kind(write_video, read_listed),
}


# ------------------------------------------------------------------------------------------------------- ten ways


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 3 * path.stat().st_size // 4])


def zeroed(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] + bytes(size - size // 2))


def two_bytes(path: Path) -> None:
    content, random = bytearray(path.read_bytes()), Random(3)
    for at in random.sample(range(len(content) // 3, len(content)), 2):
        content[at] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def header(path: Path) -> None:
    path.write_bytes(b"\xff" * 12 + path.read_bytes()[12:])


def without_checksum(path: Path) -> None:
    """Rename the field to another of the same length, as in a file that somebody wrote by hand."""
    content = path.read_bytes()
    if path.suffix == ".json":
        lines = [line for line in content.splitlines() if SEAL.encode() not in line]
        path.write_bytes(b"\n".join(lines))
    else:
        at = content.index(f'"{SEAL}"'.encode())
        path.write_bytes(content[: at + 1] + b"_" * len(SEAL) + content[at + 1 + len(SEAL) :])


CHANGES: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "zeroed": zeroed,
    "two bytes": two_bytes,
    "header": header,
    "no checksum": without_checksum,
    "folder": lambda path: (path.unlink(), path.mkdir())[0],
    "pipe": lambda path: (path.unlink(), os.mkfifo(path))[0],
}
WAYS = (*CHANGES, "nan", "swapped", "another's")


def damage(path: Path, way: str, other: Path | None) -> None:
    if way in CHANGES:
        CHANGES[way](path)
    elif other is not None:
        path.write_bytes(other.read_bytes())


def taken_for(kind: Kind, path: Path) -> tuple[Any, str]:
    """What a run reads, and what it says where it refuses the file."""
    try:
        return kind.read(path), ""
    except UserError as fault:
        return REFUSED, str(fault)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_counts_for_what_it_was_or_for_nothing(kind: str, way: str, tmp_path: Path) -> None:
    each = KINDS[kind]
    folders = [tmp_path / name for name in ("whole", "damaged", "other")]
    for folder in folders:
        folder.mkdir()
    whole, path = (each.write(folder, "mine") for folder in folders[:2])
    assert whole is not None and path is not None
    expected = each.read(whole)
    other = None if way in CHANGES else each.write(folders[2], way)
    if way == "nan" and other is None:
        pytest.skip("a video has no such numbers")
    damage(path, way, other)
    mine = path.with_name("mine.txt")
    mine.write_text("of the user")
    found, words = taken_for(each, path)
    assert words.isprintable() and len(words) < 500
    if way == "no checksum" and each.unsealed:
        assert found == expected
    elif way in ("swapped", "another's") and each.named:
        assert found == ANOTHER
    else:
        assert found == REFUSED
    assert mine.read_text() == "of the user"


# ------------------------------------------------------------------------------------------------------- whole runs


def request(picture: str, **changed: Any) -> Request:
    size = {"width": 48, "height": 32, "frames": 13, "clip_frames": 9, "steps": 2, "seed": 3}
    return Request(**{"prompt": "a red circle", "image": picture, "svi": True, **size, **changed})


@pytest.fixture(scope="module")
def uninterrupted(image_pipe: Pipeline, picture: str) -> Result:
    return image_pipe.generate(request(picture))


@pytest.fixture(scope="module")
def left(image_pipe: Pipeline, picture: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What an interrupted run leaves, and another one's."""
    folders = [tmp_path_factory.mktemp("left") / "x.clips" for _ in range(2)]
    for folder, seed in zip(folders, (3, 4), strict=True):
        image_pipe.generate(request(picture, seed=seed), Watch(keep_clips=folder))
    return folders[0], folders[1]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_from_what_is_whole(
    image_pipe: Pipeline, picture: str, uninterrupted: Result, left: tuple[Path, Path], way: str, tmp_path: Path
) -> None:
    """Its first clip is damaged, its second is whole; the same video comes of it, and the folder is gone after it."""
    folder = tmp_path / "x.clips"
    shutil.copytree(left[0], folder)
    first, second = sorted(folder.iterdir())
    other = min(left[1].iterdir()) if way == "another's" else second
    if way == "nan":
        latents, fps, settings = load_latents(first)
        other = tmp_path / "nan.latents.safetensors"
        save_latents(other, latents.where(latents > 0, torch.nan), fps, settings)
    damage(first, way, other)
    if way == "another's":  # under its own name, too
        shutil.copy(other, folder)
    again = image_pipe.generate(request(picture), Watch(keep_clips=folder))
    assert np.array_equal(again.frames, uninterrupted.frames) and torch.equal(again.latents, uninterrupted.latents)
    assert "clip 2 was finished by an earlier run" in again.report.notes
    [said] = [warning for warning in again.report.warnings if warning.startswith("clip 1")]
    assert "is made again: " in said
    if way == "another's":
        assert f"{first} has its name, and is another clip" in said
        assert any(note.startswith("1 kept clips of other videos") for note in again.report.warnings)
    remove_kept(again.kept_clips)
    assert folder.exists() == (way in ("folder", "another's"))  # nothing that may be somebody's is removed
    assert not list(folder.glob("*.latents.safetensors")) or way in ("folder", "another's")


# ------------------------------------------------------------------------------------------------- --save-latents


def arguments(picture: str, out: Path, *more: str) -> list[str]:
    words = ["generate", "--model", "tiny", "--task", "i2v-tiny", "--device", "cpu", "--prompt", "a red circle"]
    return [*words, "--image", picture, "--size", "48x32", "--steps", "2", "--seed", "3", "--out", str(out), *more]


def test_latents_of_svi_are_saved_and_decoded(picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latents, out = tmp_path / "keep.safetensors", tmp_path / "x.mp4"
    clips = ("--svi", "--frames", "29", "--clip-frames", "17")
    assert main(arguments(picture, out, *clips, "--save-latents", str(latents))) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keep.safetensors", "x.mp4"]
    stored, _, settings = load_latents(latents)
    assert stored.shape == (1, 16, 8, 4, 6) and settings["svi"] is True
    again = tmp_path / "again.mp4"
    assert main(["decode", str(latents), "--model", "tiny", "--device", "cpu", "--out", str(again)]) == 0
    # Later clips are decoded after the last latents before them, and not after all.
    assert np.abs(read_video(again).astype(int) - read_video(out)).mean() < 2


def test_latents_that_give_no_video_are_refused_before_work(
    picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "load_checked", lambda *_: pytest.fail("weights were read"))
    clips = ("--frames", "29", "--clip-frames", "17", "--save-latents", str(tmp_path / "keep.safetensors"))
    assert main(arguments(picture, tmp_path / "x.mp4", *clips)) == 2
    said = capsys.readouterr().err
    assert "--save-latents given" in said and "2 of 17 frames, 1 carried over" in said and "leave it out" in said
    os.mkfifo(tmp_path / "pipe")
    assert main(arguments(picture, tmp_path / "x.mp4", "--frames", "5", "--save-latents", str(tmp_path / "pipe"))) == 2
    assert "is a device or a pipe" in capsys.readouterr().err
    (tmp_path / "pipe").rename(tmp_path / "x.latents.safetensors")  # where they are kept while the video is made
    assert main(arguments(picture, tmp_path / "x.mp4", "--frames", "5")) == 2
    assert "is a device or a pipe" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.latents.safetensors"]
