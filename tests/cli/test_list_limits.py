"""Lists that are too large, or that name what never ends, are refused before anything of them is read or made."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from wan_core.cli import main, prompt_file
from wan_core.cluster.files import media_of
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.config.keys import contents
from wan_core.config.limits import MAX_LINE
from wan_core.pipeline.check import check_request
from wan_core.pipeline.sources import find_models
from wan_core.workers import video_list

MANY = 20_000
TINY = LoadOptions(model="tiny")
CPU = torch.device("cpu")


def refusal(folder: Path, lines: list[dict[str, Any]] | str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What a list is refused with. Its check takes seconds at most."""
    path = folder / "list.jsonl"
    path.write_text(lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines))
    begin = time.process_time()
    options = ["generate", "--model", "tiny", "--device", "cpu", "--prompts", str(path), "--out", str(folder / "o.mp4")]
    assert main([*options, *more]) == 2
    assert time.process_time() - begin < 20
    return capsys.readouterr().err


@pytest.fixture
def endless(tmp_path: Path) -> dict[str, Path]:
    """Files that a reader would not come to the end of."""
    sparse, pipe = tmp_path / "sparse.mp4", tmp_path / "pipe.mp4"
    with sparse.open("wb") as file:
        file.truncate(60 * 10**9)
    os.mkfifo(pipe)
    return {"/dev/zero": Path("/dev/zero"), "sparse": sparse, "pipe": pipe}


@pytest.mark.parametrize("name", ["/dev/zero", "sparse", "pipe"])
@pytest.mark.parametrize("field", ["image", "from_video", "keyframes"])
def test_media_without_an_end(
    name: str, field: str, endless: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(endless[name])
    value = [f"4={path}"] if field == "keyframes" else path
    words = "bytes, and at most" if name == "sparse" else "is a device or a pipe, and a file is needed"
    said = refusal(tmp_path, [{"prompt": "a"}, {"prompt": "a", field: value}], capsys)
    assert "line 2 of" in said and words in said
    assert contents(endless[name]) == ""
    with pytest.raises(OptionError, match=words):
        media_of({field: [{"frame": 4, "path": path}] if field == "keyframes" else path})


CASES: dict[str, tuple[str, str]] = {
    "unknown fields": (json.dumps({f"f{n}": 1 for n in range(MANY)}), "field 'f0' is not known"),
    "a field twice": (json.dumps({f"f{n}": 1 for n in range(MANY)})[:-1] + ', "f9": 1}', "field 'f9' is there twice"),
    "keyframes": (
        json.dumps({"prompt": "a", "keyframes": [f"{n}=a.png" for n in range(MANY)]}),
        f"field 'keyframes' has {MANY} entries, and at most 1000",
    ),
    "timed prompts": (json.dumps({"prompt": "a", "prompts_at": ["0=a"] * MANY}), "at most 1000 are allowed"),
    "a long line": (json.dumps({"prompt": "a" * MAX_LINE}), f"line 1 of list.jsonl: the line has more than {MAX_LINE}"),
    "nesting": ("[" * MANY, "no JSON object"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_line_with_very_much(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, words = CASES[case]
    assert words in refusal(tmp_path, line, capsys).replace(f"{tmp_path}/", "")


def test_limits_and_names_come_before_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many lines are refused unread; a fault of the last line is found before a file of the first is read."""
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")

    def unread(*_: Any) -> Any:
        raise AssertionError("it was read")

    with monkeypatch.context() as patch:
        patch.setattr(prompt_file._LineReader, "read", unread)
        assert "has more than 100000 videos" in refusal(tmp_path, '{"prompt": "a"}\n' * 100_001, capsys)
    monkeypatch.setattr(prompt_file, "key_of", unread)
    first = {"prompt": "a", "image": str(tmp_path / "a.png"), "out": "same.mp4"}
    assert "line 3 of" in refusal(tmp_path, [first, {"prompt": "b"}, {"prompt": ""}], capsys)
    assert "is written by line 1 too" in refusal(tmp_path, [first, first], capsys)


def test_a_list_that_never_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "tiny", "--prompts", "/dev/zero", "--out", "o.mp4"]) == 2
    assert "line 1 of /dev/zero: the line has more than" in capsys.readouterr().err


def test_lines_of_a_list_are_checked_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same notes and refusals; headers are read once for all lines that take the same models."""
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    finds: list[bool] = []
    find = find_models
    requests = [
        Request(prompt=prompt, seed=seed, image=image, steps=steps, preset=preset)
        for prompt, seed in (("a red circle", 1), ("b", 2))
        for image in (None, str(tmp_path / "a.png"))
        for steps, preset in ((4, "auto"), (20, "motion"), (20, "auto"))
    ]

    def verdict(notes: Any, request: Request) -> Any:
        try:
            return tuple(note for note in notes(request) if not note.startswith("warning: "))
        except OptionError as fault:
            return str(fault)

    alone = [verdict(lambda one: check_request(TINY, one, CPU).plan.notes, one) for one in requests]
    monkeypatch.setattr(video_list, "find_models", lambda *given, **how: finds.append(True) or find(*given, **how))
    makers = video_list.LocalMakers(None, "cpu", TINY)
    assert [verdict(makers.notes, one) for one in requests] == alone
    assert len(finds) <= 3 < len(requests)
