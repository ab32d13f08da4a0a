"""Every command of the README and the docs is one that the command line takes; those that only plan are run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from wan_core.cli import build_parser, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CALL = re.compile(r"^ *(?:\.venv/bin/python -m wan_core|python -m wan_core|wancore) (.+)$", re.MULTILINE)
REST = {"generate": ["--prompt", "x"], "warmup": [], "calibrate": [], "quality": []}  # what `...` leaves out


def commands() -> list[tuple[str, list[str]]]:
    """(page and line, arguments) of each command in a block of code; lines that end in a backslash go on."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        joined = re.sub(r"\\\n\s*", lambda match: " " * len(match[0]), text)  # offsets stay those of the page
        for match in CALL.finditer(joined):
            place = f"{page.name}:{text.count(chr(10), 0, match.start(1)) + 1}"
            found.append((place, shlex.split(match[1], comments=True)))
    return found


COMMANDS = commands()


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 25 and {"README.md", "parallel.md", "sparse.md"} <= {
        place.split(":")[0] for place, _ in COMMANDS
    }


@pytest.mark.parametrize(("place", "words"), COMMANDS, ids=[place for place, _ in COMMANDS])
def test_every_option_is_known(place: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if words[0] == "bench":
        return  # of benchmarks, which has options of its own
    if "..." in words[1:2] or (words[0] == "generate" and not {"--prompt", "--prompts"} & set(words)):
        words = [words[0], *REST[words[0]], *(word for word in words[1:] if word != "...")]
    elif "..." in words and words[words.index("...") - 1] not in ("--prompt",):
        words = [word for word in words if word != "..."]
    options = build_parser().parse_args(words)
    assert callable(options.run)
    if words[0] == "plan":
        assert main(words) == 0 and "step" in capsys.readouterr().out
