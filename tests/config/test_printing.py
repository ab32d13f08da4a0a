"""Whatever files say: no error, no line of output and no log line has characters that a terminal obeys."""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from wan_core.checkpoint.opened import CheckpointError
from wan_core.cli import main
from wan_core.config import OptionError, printing
from wan_core.config.printing import PlainStream, plain, plain_logs
from wan_core.pipeline.sources import TINY
from wan_core.workers.launcher import WorkerError

ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\x08\r\x00\u202e"


@given(st.text() | st.just(ESCAPES))
def test_any_text_can_be_printed(text: str) -> None:
    assert not printing._UNSAFE.search(plain(text)) and len(plain(text)) == len(text)
    for kind in (OptionError, CheckpointError, WorkerError):
        assert str(kind(f"it says {text}, which is wrong")).isprintable()
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    PlainStream(written).write(text)
    written.seek(0)
    assert not printing._UNSAFE.search(written.read().removeprefix("\r"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files that say `ESCAPES` wherever they may hold a text."""
    save_file({f"blocks.0.{ESCAPES}.weight": torch.zeros(2, 2)}, tmp_path / "names.safetensors", {"task": ESCAPES})
    for expert in ("high", "low"):
        shutil.copy(TINY / f"t2v_{expert}.safetensors", tmp_path)
    curve = json.loads(next(TINY.glob("*.magcache.json")).read_text())
    (tmp_path / "t2v_high.magcache.json").write_text(json.dumps({**curve, "task": ESCAPES, "source": ESCAPES}))
    save_file({"x.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "lora.safetensors", {"ss_base": ESCAPES, ESCAPES: "x"})
    line = {"prompt": "a", "image": f"{ESCAPES[1:8]}.png", "out": f"{ESCAPES[1:8]}.mp4", ESCAPES: ESCAPES}
    (tmp_path / "list.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "' + ESCAPES)
    (tmp_path / "speed.preset.json").write_text(json.dumps({"format": ESCAPES, "task": ESCAPES}))
    (tmp_path / f"{ESCAPES[1:6]}.png").write_text(ESCAPES)
    return tmp_path


COMMANDS = {
    "names": "inspect names.safetensors",
    "lora": "inspect lora.safetensors",
    "folder": "inspect .",
    "json": "inspect lora.safetensors --json",
    "curve": "plan --high t2v_high.safetensors --low t2v_low.safetensors --magcache 0.12",
    "with lora": "plan --model tiny --lora lora.safetensors --lora names.safetensors",
    "preset": "plan --model tiny --speed speed.preset.json",
    "list": "generate --model tiny --prompts list.jsonl --out o.mp4",
    "broken list": "generate --model tiny --prompts broken.jsonl --out o.mp4",
    "picture": f"generate --model tiny --prompt a --image {ESCAPES[1:6]}.png --out o.mp4",
    "option": f"plan --task {ESCAPES[1:6]}",
    "unknown": f"plan --{ESCAPES[1:6]}",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_prints_what_a_terminal_obeys(
    command: str, files: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    streams = sys.stdout, sys.stderr
    with suppress(SystemExit):
        main(command.split())
    assert (sys.stdout, sys.stderr) == streams
    said = "".join(capfd.readouterr())
    assert said and not printing._UNSAFE.search(said.replace("\r", ""))


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """What others who print the log lines of this project print."""
    make, written = logging.getLogRecordFactory(), io.StringIO()
    handler = logging.StreamHandler(written)
    logging.getLogger().addHandler(handler)
    plain_logs()
    yield written
    logging.setLogRecordFactory(make)
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("name", ["WanCore", "wan_core.pipeline.encode", "other"])
def test_log_lines(logs: io.StringIO, name: str) -> None:
    logging.getLogger(name).warning("a note of %s and %d", ESCAPES, 3)
    assert bool(printing._UNSAFE.search(logs.getvalue())) == (name == "other") and "and 3" in logs.getvalue()
