"""Bring the files that repeat what nodes say up to date, from what they declare. It needs no ComfyUI.

    python tools/make_schemas.py

It writes tests/nodes/node_schemas.json, with which the tests compare the nodes: anew before the first release, and
from then on only what is new, because shared workflows rely on the rest. And it writes the lists of web/docs, whose
lines are the tooltips, and those of the pages in Chinese (web/docs/NODE/zh.md) from locales/zh, which is written by
hand; `tests/nodes/test_locales.py` says what is missing there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.declared_nodes import OF_COMFYUI, declared
from tools.workflows import OWN_SCHEMAS, Schema

SHORT = ("WanCoreSampler", "WanCoreAccelerate")
KEYS = ("default", "multiline", "control_after_generate")
ROOT = Path(__file__).resolve().parents[1]
CHANGELOG, RELEASE = ROOT / "CHANGELOG.md", re.compile(r"^## \[[\d.]+\] - \d", re.MULTILINE)  # has a date
PAGES, CHINESE_TEXTS = ROOT / "web" / "docs", ROOT / "locales" / "zh" / "nodeDefs.json"


def schema_of(node: Any) -> Schema:
    """What a node declares, as the file has it."""
    inputs = []
    for one in node.inputs:
        entry = {"name": one["name"], "type": one["type"], "optional": bool(one.get("optional"))}
        entry |= {key: one[key] for key in KEYS if one.get(key) is not None}
        entry |= {"options": list(one["options"])} if one.get("options") and one["options"] not in OF_COMFYUI else {}
        inputs.append(entry)
    return {"inputs": inputs, "outputs": [{"name": one["name"], "type": one["type"]} for one in node.outputs]}


def extended(before: Schema | None, now: Schema) -> Schema:
    """What was frozen, and what is new behind it. A combo has its new values, unless it lost one: a test says so."""
    if before is None:
        return now
    both = {}
    for kind in ("inputs", "outputs"):
        entries = {entry["name"]: entry for entry in before[kind]}
        for entry in now[kind]:
            options = entries.get(entry["name"], {}).get("options")
            if options is not None and set(options) <= set(entry.get("options", ())):
                entries[entry["name"]]["options"] = entry["options"]
        both[kind] = [*before[kind], *(entry for entry in now[kind] if entry["name"] not in entries)]
    return both


def written(schemas: dict[str, Schema]) -> str:
    """One line for each input and output."""
    nodes = []
    for name, schema in schemas.items():
        parts = []
        for kind in ("inputs", "outputs"):
            lines = ",\n".join("   " + json.dumps(entry, ensure_ascii=False) for entry in schema[kind])
            parts.append(f'  "{kind}": [\n{lines}\n  ]' if lines else f'  "{kind}": []')
        nodes.append(f' "{name}": {{\n' + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(nodes) + "\n}\n"


def listed(name: str, node: Any) -> list[list[tuple[str, str]]]:
    """Names and tooltips of the inputs and outputs on a node's page. Those of `SHORT` leave out what the node folds,
    and have the first sentence of a tooltip, or as many as have six words."""
    if name not in SHORT:
        return [[(one["name"], one["tooltip"]) for one in entries] for entries in (node.inputs, node.outputs)]
    inputs = [one for one in node.inputs if not one.get("advanced")]
    return [[(one["name"], first_sentence(one["tooltip"])) for one in entries] for entries in (inputs, node.outputs)]


def first_sentence(text: str) -> str:
    sentences = re.split(r"(?<=\.)\s+", text)
    count = next((n for n in range(1, len(sentences)) if len(" ".join(sentences[:n]).split()) >= 6), len(sentences))
    return " ".join(sentences[:count])


def with_lists(page: str, inputs: Iterable[tuple[str, str]], outputs: Iterable[tuple[str, str]]) -> str:
    """A page of web/docs with the lists of these names and tooltips, in which 'words' become `words`."""
    for heading, entries in (("Inputs", inputs), ("Outputs", outputs)):
        lines = (f"- **`{name}`**: {_as_code(text, APOSTROPHES)}" for name, text in entries)
        page = _with_list(page, heading, lines)
    return page


def chinese_page(page: str, texts: dict[str, Any]) -> str:
    """A page of web/docs in Chinese, from a node of locales/zh/nodeDefs.json. Text after the lists of `page` stays."""
    page = page if CHINESE["inputs"] in page else f"\n\n## {CHINESE['inputs']}\n\n\n## {CHINESE['outputs']}\n\n"
    _, _, lists = page.partition(f"## {CHINESE['inputs']}\n")
    page = f"# {texts['display_name']}\n\n{texts['description']}\n\n## {CHINESE['inputs']}\n{lists}"
    for kind, heading in CHINESE.items():
        entries = texts[kind].items()
        named = ((one["name"], f"（`{name}`）" if kind == "inputs" else "", one["tooltip"]) for name, one in entries)
        lines = (f"- **{name}**{also}：{_as_code(text, QUOTES)}" for name, also, text in named)
        page = _with_list(page, heading, lines)
    return page


APOSTROPHES, QUOTES = re.compile(r"(?<!\w)'([^']+)'(?!\w)"), re.compile(r"“([ -~]+)”")
CHINESE = {"inputs": "输入", "outputs": "输出"}


def _as_code(text: str, quotes: re.Pattern[str]) -> str:
    return quotes.sub(r"`\1`", text)


def _with_list(page: str, heading: str, lines: Iterable[str]) -> str:
    text = f"## {heading}\n\n" + "".join(f"{line}\n" for line in lines)
    return re.sub(rf"## {heading}\n\n(- .*\n)*", lambda _: text, page)


def write_chinese_pages() -> None:
    for name, texts in json.loads(CHINESE_TEXTS.read_text(encoding="utf-8")).items():
        path = PAGES / name / "zh.md"
        path.parent.mkdir(exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(chinese_page(before, texts), encoding="utf-8")


def main() -> None:
    released = RELEASE.search(CHANGELOG.read_text(encoding="utf-8")) is not None
    schemas: dict[str, Schema] = json.loads(OWN_SCHEMAS.read_text(encoding="utf-8")) if released else {}
    for name, node in declared().items():
        schemas[name] = extended(schemas.get(name), schema_of(node))
        page = PAGES / f"{name}.md"
        page.write_text(with_lists(page.read_text(encoding="utf-8"), *listed(name, node)), encoding="utf-8")
    OWN_SCHEMAS.write_text(written(schemas), encoding="utf-8")
    write_chinese_pages()


if __name__ == "__main__":
    main()
