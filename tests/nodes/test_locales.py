"""Help and translations: every node, input and output is there in each language, and nothing that is no longer one.
English is what the nodes themselves say: ComfyUI's page shows that where a language has no text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import test_nodes_schemas
from tools.make_schemas import SHORT, chinese_page, listed, with_lists

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 250  # of a short help page
LOCALES = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in ROOT.glob("locales/*/nodeDefs.json")
}
HELP = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "web" / "docs").glob("*.md")}
schemas = test_nodes_schemas.schemas  # a fixture
IN_MESSAGES = re.compile(r"[{}@|]")  # vue-i18n gives these a meaning


def sentences(entry: dict[str, Any] | str) -> list[str]:
    return [entry] if isinstance(entry, str) else [word for inner in entry.values() for word in sentences(inner)]


def test_languages() -> None:
    assert set(LOCALES) == {"zh"}


@pytest.mark.parametrize("language", LOCALES)
def test_every_node_and_input_is_covered_and_none_is_stale(schemas: dict[str, Any], language: str) -> None:
    texts = LOCALES[language]
    assert set(texts) == set(schemas)
    for name, schema in schemas.items():
        assert set(texts[name]) == {"display_name", "description", "inputs", "outputs"}
        assert list(texts[name]["inputs"]) == [entry["name"] for entry in schema.inputs], name
        assert list(texts[name]["outputs"]) == [str(slot) for slot in range(len(schema.outputs))], name
        for entry in (*texts[name]["inputs"].values(), *texts[name]["outputs"].values()):
            assert set(entry) == {"name", "tooltip"}
    assert all(word.strip() and not IN_MESSAGES.search(word) for word in sentences(texts))


def test_chinese_is_chinese(schemas: dict[str, Any]) -> None:
    """Tooltips are sentences in Chinese with its own punctuation, and numbers are those of the English text."""
    for name, node in LOCALES["zh"].items():
        for key, entry in {**node["inputs"], **node["outputs"]}.items():
            assert re.search(r"[\u4e00-\u9fff]|VAE", entry["tooltip"]), f"{name}.{key}"
            assert not re.search(r"[\u4e00-\u9fff][,;:()]|[,;:()][\u4e00-\u9fff]", entry["tooltip"]), f"{name}.{key}"
        for entry in schemas[name].inputs:
            texts = entry["tooltip"], node["inputs"][entry["name"]]["tooltip"]
            numbers = [sorted(set(re.findall(r"\d[\d.]*\d|\d", text))) for text in texts]
            assert set(numbers[0]) <= set(numbers[1]), f"{name}.{entry['name']}: {numbers}"


def test_every_node_has_a_help_page_whose_lists_are_the_tooltips(schemas: dict[str, Any]) -> None:
    """Written by tools/make_schemas.py: run it after a change of a tooltip, and mend the other languages."""
    assert set(HELP) == set(schemas)
    for name, schema in schemas.items():
        assert HELP[name].startswith(f"# {schema.display_name}\n")
        texts = listed(name, schema)
        assert HELP[name] == with_lists(HELP[name], *texts), name
        rows = re.findall(r"^- \*\*`(\w+)`\*\*: ", HELP[name], re.MULTILINE)
        assert len(rows) == sum(map(len, texts)), f"{name} describes what it does not have: {rows}"
        assert name not in SHORT or len(re.findall(r"\w+(?:[-'.]\w+)*", HELP[name])) <= MOST_WORDS


def test_every_node_has_a_help_page_in_chinese(schemas: dict[str, Any]) -> None:
    """The frontend asks for NODE/LANGUAGE.md first. `python tools/make_schemas.py` writes the lists."""
    pages = {path.parent.name: path.read_text(encoding="utf-8") for path in (ROOT / "web" / "docs").glob("*/zh.md")}
    assert set(pages) == set(schemas)
    for name, page in pages.items():
        assert page == chinese_page(page, LOCALES["zh"][name]), name
        for entry in schemas[name].inputs:
            assert f"（`{entry['name']}`）：" in page, f"{name}.{entry['name']}"
