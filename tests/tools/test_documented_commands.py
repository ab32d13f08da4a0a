"""Every command of the README and the docs is one that can be given: its options, files and weights are there.

`make documented` runs those that a CPU can run (`test_documented_runs.py`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest
import tomllib

from benchmarks.__main__ import build_parser as benchmark_parser
from benchmarks.options import ARCHIVED, OPTIONS, SUITES
from tests.documented import (
    BENCHMARKS,
    FENCE,
    MODELS,
    PAGES,
    PROGRAM,
    ROOT,
    WEIGHT_FILE,
    Command,
    commands,
    fences,
    folder_of,
    is_name,
    option_spans,
    reason_not_run,
    weight_rows,
    weights_section,
)
from wan_core.cli import build_parser, main

COMMANDS = commands()
SECTION = weights_section(MODELS.read_text(encoding="utf-8"))
PARSER = build_parser()
LANGUAGES = {"bash", "sh", "json", "python", "text", "yaml"}


def check_each(commands: list[Command], check: Callable[[Command], None]) -> None:
    """Call `check` with every command; all that are wrong are named."""
    faults = {}
    for command in commands:
        try:
            check(command)
        except (AssertionError, LookupError, SystemExit) as fault:
            faults[command.place] = f"{command.text}: {fault}"
    assert not faults


@pytest.mark.parametrize("pattern", ["web/docs/**/*.md", "locales/*/nodeDefs.json", "nodes/**/*.py"])
def test_comfyui_names_the_command_that_runs_in_any_folder(pattern: str) -> None:
    """`python -m wan_core` runs in the repository alone. Nodes name `wancore` and its chapter."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern))]
    assert pages and not [text for text in pages if "python -m wan_core" in text]
    told = [text[at.end() :] for text in pages for at in re.finditer(r"`wancore [^`]+`", text) if "web" in pattern]
    assert all(after.startswith((" (docs/install.md, Command line)", "（见 docs/install.md）")) for after in told)
    assert "\n## Command line\n" in (ROOT / "docs/install.md").read_text(encoding="utf-8")


def test_every_block_says_what_it_holds() -> None:
    """So that no command is overlooked: those in blocks of another kind are not found, nor are indented ones."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert {language for language, _, _ in fences(text)} <= LANGUAGES, page
        assert text.count("\n```") == 2 * len(list(fences(text))), page
        lines = FENCE.sub("", text).splitlines()
        lines = [line for line in lines if line.startswith("    ") and PROGRAM.match(line.strip())]
        assert not lines, page


def test_a_rule_says_whether_it_is_run() -> None:
    check_each(COMMANDS, lambda command: reason_not_run(command) and None)


def of_ours() -> list[Command]:
    return [command for command in COMMANDS if command.own is not None and command.own[0] != "bench"]


def test_every_option_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    def check(command: Command) -> None:
        arguments = command.own or []
        if not command.block and is_name(arguments):
            options = [word for word in arguments[1:] if word.startswith("--")]
            help_text = (
                PARSER.format_help() if arguments[0] == "COMMAND" else PARSER.commands[arguments[0]].format_help()
            )
            assert all(f"{option} " in help_text or f"{option}\n" in help_text for option in options)
            return
        assert callable(build_parser().parse_args(arguments).run)
        if arguments[0] == "plan" and "--memory" not in arguments:
            assert main(arguments) == 0 and "step" in capsys.readouterr().out

    check_each(of_ours(), check)


OTHERS = {  # options of others -> whose
    "--num-cpus": "ray",
    "--num-gpus": "ray",
    "--cpu": "ComfyUI", "--cache-none": "ComfyUI", "--use-sage-attention": "ComfyUI", "--use-ck-attention": "ComfyUI",
    "--on-cpu": "benchmarks/ladder.py", "--dry-run": "benchmarks/ladder.py", "--keep": "tools/judges.py",
}  # fmt: skip


def test_every_option_in_the_text_is_known() -> None:
    pages = [parser.format_help() for parser in (PARSER, *PARSER.commands.values())]
    known_options = {*re.findall(r"--[a-z][\w-]*", " ".join(pages)), *OTHERS, *(f"--{name}" for name in OPTIONS)}
    for page in PAGES:
        named = {option for span in option_spans(page) for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
        assert named <= known_options, page
    assert all(f'"{option}"' in (ROOT / file).read_text() for option, file in OTHERS.items() if file.endswith(".py"))


def test_every_measurement_is_known() -> None:
    """But for those of tables, which older versions ran."""

    def check(command: Command) -> None:
        measured = BENCHMARKS.match(command.text)
        arguments = shlex.split((measured[1] or "") if measured else "", comments=True)
        suite = arguments[:1]
        if suite and suite[0] not in ("SUITE", "NAME", "ladder", "pack", *ARCHIVED):  # two are programs of their own
            assert benchmark_parser().parse_args(arguments).suite in SUITES

    check_each([command for command in COMMANDS if not command.dated], check)


def test_files_and_targets_are_there() -> None:
    """Targets of make, extras and requirements of pip, modules, tests and workflows."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

    def check(command: Command) -> None:
        arguments, text = shlex.split(command.text, comments=True), command.text
        assert arguments[0] != "make" or re.search(rf"^{arguments[1]}:", makefile, re.MULTILINE)
        assert set(re.findall(r"wancore\[(\w+)\]", text)) <= set(extras)
        names = re.findall(r"(?:^|\s)((?:tests|tools|workflows|wan_core/assets)/[\w./-]+|[\w-]+\.txt)", text)
        modules = re.findall(r"-m ((?:tools|benchmarks|wan_core)(?:\.\w+)?)", text)
        names += [name.replace(".", "/") for name in modules]
        assert all((ROOT / name).exists() or (ROOT / f"{name}.py").is_file() for name in names)

    check_each([command for command in COMMANDS if not command.dated], check)


# ------------------------------------------------------------------------------------------------------------- weights


ROWS = weight_rows(SECTION)


def test_every_weight_of_a_command_is_in_the_tables() -> None:
    """By its name, and in its folder; those of the embedded model are in the repository."""
    listed = {f"{folder_of(name)}/{name}" for row in ROWS for name in row}

    def check(command: Command) -> None:
        arguments = [re.sub("^((high|low)=)?(ComfyUI/models/)?", "", word) for word in command.own or []]
        weights = {word for word in arguments if WEIGHT_FILE.search(word) and not word.startswith("wan_core/assets/")}
        assert weights <= listed | ({arguments[2]} if arguments[0] == "quantize" and len(arguments) > 2 else set())

    check_each(of_ours(), check)
