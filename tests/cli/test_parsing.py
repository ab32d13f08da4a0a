"""The command line before it runs anything: help, usage, suggestions, version, a closed pipe, missing libraries."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress

import pytest

import wan_core
from benchmarks.__main__ import main as benchmarks
from wan_core.cli import COMMANDS, PIPE_CLOSED, build_parser, main
from wan_core.cli.libraries import LIBRARIES
from wan_core.cli.prompt_file import read_list
from wan_core.config import LoadOptions
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


def test_a_call_without_a_command_lists_the_commands(capsys):
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "generate" in said and "doctor" in said and "usage:" in said


@pytest.mark.parametrize(("called", "name"), [("/usr/bin/wancore", "wancore"), ("x/__main__.py", "python -m wan_core")])
def test_errors_name_the_program_that_was_called(called, name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [called])
    assert main(["generate", "--prompt", "x"]) == 2
    assert capsys.readouterr().err.startswith(f"{name} generate: no model given")


def test_what_is_missing_is_called_by_its_name(capsys, tmp_path):
    given = ["generate", "--prompt", "x", "--out", str(tmp_path / "x.mp4")]
    assert main([*given, "--high", "wan_core/assets/tiny/t2v_high.safetensors"]) == 2
    assert "no text encoder and no VAE given: add --text-encoder, --vae" in capsys.readouterr().err
    assert main([*given, "--model", str(tmp_path)]) == 2
    assert f"no transformer and no text encoder and no VAE given or found in {tmp_path}" in capsys.readouterr().err


NAMED = (
    "--high",
    "--low",
    "--vae",
    "--text-encoder",
    "--tokenizer",
    "--clip-vision",
    "--lora",
    "--lora-low",
    "--image",
)


@pytest.mark.parametrize("option", NAMED)
def test_a_file_that_is_not_there_is_the_first_complaint(option, capsys, tmp_path):
    """Whatever else is missing or wrong in the same command."""
    given = ["generate", "--prompt", "x", "--steps", "0", "--out", str(tmp_path / "no" / "x.mp4")]
    assert main([*given, option, "nothere.safetensors"]) == 2
    assert f"generate: {option} nothere.safetensors does not exist" in capsys.readouterr().err
    assert main([*given, option, "READMEE.md"]) == 2
    assert capsys.readouterr().err.endswith("READMEE.md does not exist; did you mean README.md?\n")


def test_the_benchmarks_call_themselves_by_name(capsys):
    with pytest.raises(SystemExit):
        benchmarks(["--no-such-option"])
    assert "python -m benchmarks: error" in capsys.readouterr().err
    assert benchmarks(["attention", "--device", "cuda:99"]) == 2
    assert capsys.readouterr().err.startswith("python -m benchmarks: ")


@pytest.mark.parametrize("option", ["--reference", "--image", "--last-image", "--from-video"])
def test_a_second_file_is_refused_by_name(option, capsys):
    err = fault(["generate", "--prompt", "x", option, "README.md", option, "LICENSE"], capsys)
    assert f"{option}: one file is taken, and README.md and LICENSE are given: leave one out" in err


def test_a_line_of_a_list_may_name_another_picture_than_the_command(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "image": "docs/images/text_to_video.png"}\n{"prompt": "y"}\n')
    given = ["generate", "--model", "tiny", "--prompts", str(tmp_path / "a.jsonl"), "--image", "docs/demo.png"]
    options = build_parser().parse_args(given)
    videos = read_list(tmp_path / "a.jsonl", options, LoadOptions(model="tiny"))
    assert [video.request.image for video in videos] == ["docs/images/text_to_video.png", "docs/demo.png"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["generate"], "nothing to do: give --prompt or --prompts"),
        (["generate", "--prompt", "x", "--prompts", "y"], "--prompt and --prompts given: leave one out"),
        (["inspect"], "missing: file"),
        (
            ["generate", "--prompt", "x", "--size", "-5x5"],
            "--size needs a value; --size=VALUE for one",
        ),
        (["plan", "--image", "docs/demo.png"], "unknown: docs/demo.png (--image takes no value here)"),
    ],
)
def test_what_is_missing_or_too_much_is_said_in_words(given, says, capsys):
    assert says in fault(given, capsys)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["plan", "--frames", "80"], "The nearest is 81"),
        (["plan", "--size", "832x480"], "--size changes no step: add --memory"),
        (["plan", "--memory-limit", "24"], "--memory-limit changes no step: add --memory"),
        (["plan", "--memory", "--host-memory-limit", "24"], "--host-memory-limit changes nothing"),
        (["plan", "--host-memory-limit", "24"], "--host-memory-limit changes nothing"),
        (["generate", "--model", "ComfyUI/models", "--prompt", "x"], "there is no folder ComfyUI/models"),
        (["generate", "--model", "tiny", "--prompt", "x", "--out", ""], "--out . is no name for a video"),
        (["generate", "--model", "tiny", "--prompt", "x", "--out", ".."], "--out .. is no name for a video"),
        (
            ["generate", "--model", "tiny", "--prompt", "x", "--out", "/dev/null"],
            "--out /dev/null is no name for a video",
        ),
        (["generate", "--model", "tiny", "--prompt", "x", "--device", "cuda:99"], ": use c"),
        (["generate", "--model", "tiny", "--prompt", "x", "--lora", "README.md"], "README.md: a text, not a model"),
        (
            ["generate", "--model", "tiny", "--prompt", "x", "--high", "docs/demo.png"],
            "a picture, a sound or a video",
        ),
        (["generate", "--model", "tiny", "--prompts", "docs/demo.png"], "is no text in UTF-8: write one JSON object"),
    ],
)
def test_wrong_input_says_what_to_do(given, says, capsys, tmp_path):
    out = ["--out", str(tmp_path / "x.mp4")] if given[0] == "generate" and "--out" not in given else []
    assert main([*given, *out]) == 2
    assert says in capsys.readouterr().err


def test_a_plan_that_does_not_fit_says_what_may(capsys):
    assert main(["plan", "--memory", "--memory-limit", "2", "--task", "ti2v-5B"]) == 1
    assert "it does not fit: try" in capsys.readouterr().err


def test_libraries_are_installed_from_where_they_are():
    """This package is in no index that pip searches, so that its extras cannot be installed by name."""
    assert not [name for name, (_, install) in LIBRARIES.items() if install is not None and "wancore" in install]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--seed", "abc"], "argument --seed: 'abc' is neither a whole number nor random"),
        (["--frames", "5.5"], "argument --frames: '5.5' is no whole number"),
        (["--shift", "x"], "argument --shift: 'x' is no number"),
    ],
)
def test_what_is_no_number_is_said_in_words(given, says, capsys):
    assert says in fault(["generate", "--prompt", "x", *given], capsys)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999"])
def test_no_option_takes_a_number_that_is_none(number, capsys):
    """Of all commands; and the numbers inside of other options, each in its place."""
    asked = 0
    for name, command in build_parser().commands.items():
        for option in (one.option_strings[-1] for one in command._actions if one.type is float):
            assert f"{option}: '{number}' is no number" in fault([name, f"{option}={number}"], capsys)
            asked += 1
    assert asked > 30
    for option, whole in COMPOUND.items():
        parts = re.split("([/:-])", whole)
        for place in range(0, len(parts), 2):
            text = "".join([*parts[:place], number, *parts[place + 1 :]])
            with suppress(SystemExit):
                assert main(["plan", "--task", "t2v-A14B", f"{option}={text}"]) == 2, (option, text)
            assert 1 <= len(capsys.readouterr().err.splitlines()) <= 2, (option, text)


COMPOUND = {
    "--nag": "11/2.5/0.25", "--magcache": "0.1/2/0.2", "--taylorseer": "2/1/0.2", "--adaptive": "0.1/2/0.2",
    "--pattern": "5/5/1", "--guidance-interval": "0-1", "--sparse": "0.5/0/0", "--stages": "0.5/0.5-1",
    "--windows": "9/4",
}  # fmt: skip
