"""The command line before it runs anything: help, usage, suggestions, version, a closed pipe, missing libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forked import Forked
from wan_core.cli import COMMANDS, PIPE_CLOSED, build_parser, main
from wan_core.cli.prompt_file import read_list
from wan_core.config import LoadOptions
from wan_core.models.wan.families import TASKS

PLAN = [sys.executable, "-m", "wan_core", "plan", "--steps", "1000"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_shows_every_default(name: str) -> None:
    parser = build_parser().commands[name]
    text = " ".join(parser.format_help().split())
    for action in parser._actions:
        says_something = action.default not in (None, [], (), "==SUPPRESS==") and action.default is not False
        if action.option_strings and says_something:
            own = text[text.rindex(action.option_strings[-1] + " ") :]
            assert f"(default {action.default})" in own or "default" in (action.help or ""), action.option_strings


def test_the_help_has_the_defaults_of_each_task() -> None:
    text = build_parser().commands["generate"].format_help()
    lines = {line.split()[0]: line.split() for line in text[text.index("defaults of the tasks") :].splitlines()[2:]}
    for task in TASKS.values():
        size, frames, _, steps, shift = lines[task.name][1:6]
        assert (size, int(frames), int(steps)) == (f"{task.width}x{task.height}", task.frames, task.steps)
        assert float(shift) == task.shift


def test_a_reader_that_ends_early_is_no_error() -> None:
    """`wancore plan | head -1` prints no error."""
    with Forked(PLAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()  # before it has written anything
        assert running.stderr.read() == ""
    assert running.returncode == PIPE_CLOSED


@pytest.mark.parametrize("command", [["doctor"], ["generate", "--model", "tiny", "--prompt", "x"]])
def test_without_torch_it_says_what_to_install(command: list[str]) -> None:
    program = f"import sys; sys.modules['torch'] = None; from wan_core.cli import main; sys.exit(main({command}))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "pip install torch" in ended.stdout + ended.stderr and "Traceback" not in ended.stderr
    assert ended.returncode == (1 if command == ["doctor"] else 2)
    if command == ["doctor"]:
        assert "sentencepiece" in ended.stdout and "pytorch.org" in ended.stdout


def test_bench_starts_the_benchmarks_of_the_checkout(capfd):
    assert main(["bench", "--help"]) == 0
    assert "usage: python -m benchmarks SUITE" in capfd.readouterr().out


def test_a_call_without_a_command_lists_the_commands(capsys):
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "generate" in said and "doctor" in said and "usage:" in said


def test_a_line_of_a_list_may_name_another_picture_than_the_command(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "image": "docs/images/text_to_video.png"}\n{"prompt": "y"}\n')
    arguments = ["generate", "--model", "tiny", "--prompts", str(tmp_path / "a.jsonl"), "--image", "docs/demo.png"]
    options = build_parser().parse_args(arguments)
    videos = read_list(tmp_path / "a.jsonl", options, LoadOptions(model="tiny"))
    assert [video.request.image for video in videos] == ["docs/images/text_to_video.png", "docs/demo.png"]


def test_a_plan_that_does_not_fit_says_what_may(capsys):
    assert main(["plan", "--memory", "--memory-limit", "2", "--task", "ti2v-5B"]) == 1
    assert "it does not fit: try" in capsys.readouterr().err
