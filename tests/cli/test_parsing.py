"""The command line before it runs anything: help, usage, suggestions, version, a closed pipe, missing libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wan_core
from wan_core.cli import COMMANDS, PIPE_CLOSED, build_parser, main
from wan_core.models.wan.tasks import TASKS

PLAN = [sys.executable, "-m", "wan_core", "plan", "--steps", "1000"]


def fault(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_shows_every_default(name: str) -> None:
    parser = build_parser().commands[name]
    text = " ".join(parser.format_help().split())
    for action in parser._actions:
        says_something = action.default not in (None, [], "==SUPPRESS==") and action.default is not False
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


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["genrate"], "generate"),
        (["generate", "--promt", "x"], "--prompt"),
        (["generate", "--prompt", "x", "--guidence=3"], "--guidance"),
        (["plan", "--solver", "unipk"], "unipc"),
        (["doctor", "--jsn"], "--json"),
    ],
)
def test_errors_are_short_and_name_what_may_be_meant(arguments: list[str], meant: str, capsys) -> None:
    lines = fault(arguments, capsys).splitlines()
    assert len(lines) == 2 and f"did you mean {meant}?" in lines[0]
    assert lines[1].startswith("usage: ") and lines[1].endswith("--help")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["plan", "--task", "t2v-A14"], "t2v-A14B"),
        (["plan", "--high", "wan_core/assets/tiny/t2v_hgih.safetensors"], "t2v_high"),
        (["generate", "--model", "tinny", "--prompt", "x"], "tiny"),
        (["generate", "--model", "tiny", "--vae", "wan_core/assets/tiny/vea.safetensors", "--prompt", "x"], "vae.safe"),
        (["generate", "--model", "tiny", "--attention", "sdpaa", "--prompt", "x", "--device", "cpu"], "sdpa"),
        (["inspect", "wan_core/assets/tinny"], "tiny"),
    ],
)
def test_values_that_are_nearly_right(arguments: list[str], meant: str, capsys) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"did you mean {meant}" in said, said


def test_an_unknown_option_suggests_nothing_far_away(capsys) -> None:
    assert "did you mean" not in fault(["plan", "--bogus"], capsys)


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"wancore {wan_core.__version__}\n"


def test_a_reader_that_ends_early_is_no_error() -> None:
    """As `wancore plan | head -1`."""
    with subprocess.Popen(PLAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
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
