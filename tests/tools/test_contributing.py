"""What contributors and reporters of bugs read, and where the default negative prompt says whose it is."""

from __future__ import annotations

import re
from pathlib import Path

from wan_core.cli import build_parser
from wan_core.models.wan.families.family import NEGATIVE_SOURCE

ROOT = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_contributing_names_commands_and_files_that_are_there() -> None:
    page, makefile = text("CONTRIBUTING.md"), text("Makefile")
    commands = re.findall(r"^make (\w+)", page, re.MULTILINE)
    assert len(commands) == 3 and all(f"\n{name}:" in makefile for name in commands)
    linked = {*re.findall(r"\]\(([^)]+)\)", page), *re.findall(r"\btests/\S+\.py", page)}
    assert linked and all((ROOT / name).exists() for name in linked)


def test_bug_reports_ask_for_the_doctor() -> None:
    form = text(".github/ISSUE_TEMPLATE/bug_report.yml")
    (doctor,) = [block for block in form.split("  - type: ") if "id: doctor" in block]
    assert "python -m wan_core doctor" in doctor and "required: true" in doctor
    options = build_parser()
    assert "--verbose" in form and "--verbose" in options.format_help()
    assert "--report" in form and "--report" in options.commands["generate"].format_help()


def test_the_default_negative_prompt_says_whose_it_is() -> None:
    place = "wan/configs/shared_config.py"
    assert "this project's own" in NEGATIVE_SOURCE and place in NEGATIVE_SOURCE
    shown = "".join(build_parser().commands["generate"].format_help().split())  # lines are broken at hyphens too
    assert "".join(NEGATIVE_SOURCE.split()) in shown
    assert NEGATIVE_SOURCE in text("web/docs/WanCoreTextEncode.md")  # the tooltip
    for name in ("locales/zh/nodeDefs.json", "docs/families.md"):
        assert place in text(name), name
