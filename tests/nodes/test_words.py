"""No word has two meanings: those of `speed` are values of no other option, in nodes, command, docs and locales."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from tools.declared_nodes import declared
from wan_core.cli import build_parser
from wan_core.config import EXACT, SPEEDS
from wan_core.sampling.cache.speed import WORDS

ROOT = Path(__file__).resolve().parents[2]
# The card's 8-bit kernel, which a word of speed takes too; and how a finished video is encoded.
ELSEWHERE = {("fast", "attention"), ("fast", "encoder")}
CACHES = re.compile(rf"(magcache|sparse|taylorseer)[ :=`]+({'|'.join(SPEEDS)}|quality)\b")
MEASURED = ("benchmarks.md", "log.md", "quality.md")  # rows have the names of their time


def of_nodes() -> set[tuple[str, str]]:
    """(word, input) of the lists of all nodes."""
    inputs = [one for schema in declared().values() for one in schema.inputs if one.get("options")]
    return {(str(word), one["name"]) for one in inputs for word in one["options"]}


def of_commands() -> set[tuple[str, str]]:
    """(word, option) of the choices of all commands."""
    [commands] = [one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)]
    actions = [action for command in commands.choices.values() for action in command._actions if action.choices]
    return {(str(word), action.dest) for action in actions for word in action.choices}


@pytest.mark.parametrize("collected", [of_nodes, of_commands])
def test_the_words_of_speed_are_values_of_no_other_option(collected) -> None:
    values = {(word, name) for word, name in collected() if word in SPEEDS}
    assert {(word, "speed") for word in SPEEDS} <= values
    assert {(word, name) for word, name in values if name != "speed"} <= ELSEWHERE
    assert tuple(WORDS) == SPEEDS and SPEEDS[0] == EXACT


def test_help_and_docs_give_a_word_to_no_step_cache_and_no_sparse_attention() -> None:
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name not in MEASURED]
    pages += [ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "web" / "docs").rglob("*.md")]
    pages += [*(ROOT / "workflows").rglob("*.json")]
    for page in pages:
        assert not CACHES.search(page.read_text(encoding="utf-8")), page


def test_locales_explain_the_words_at_speed_alone() -> None:
    nodes = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))
    for node, texts in nodes.items():
        for name, one in texts["inputs"].items():
            assert name == "speed" or not re.search(r"\b(careful|balanced)\b", one["tooltip"]), (node, name)
