"""Bring the files that repeat what nodes say up to date, from a running ComfyUI that has this pack.

    python tools/make_schemas.py http://127.0.0.1:8188

It adds new nodes and new inputs to tests/nodes/node_schemas.json; what is there already stays as it is: the tests
compare the nodes with it. And it writes the lists of web/docs, whose lines are the tooltips, and those of the pages in
Chinese (web/docs/NODE/zh.md) from locales/zh, which is written by hand; `tests/nodes/test_locales.py` says what is
missing there. `--chinese` in place of the address writes these alone. Start that ComfyUI without models of its own, or
their names would be written.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.workflows import OWN_SCHEMAS, Schema, native_schema

KEYS = ("default", "multiline", "control_after_generate")
ROOT = Path(__file__).resolve().parents[1]
PAGES, CHINESE_TEXTS = ROOT / "web" / "docs", ROOT / "locales" / "zh" / "nodeDefs.json"


def schema_of(info: dict[str, Any]) -> Schema:
    """A node of `/object_info`, as the file has it."""
    schema = native_schema(info)
    inputs = {name: entry for group in info["input"].values() for name, entry in group.items()}
    for entry in schema["inputs"]:
        facts = inputs[entry["name"]][1] if len(inputs[entry["name"]]) > 1 else {}
        entry |= {key: facts[key] for key in KEYS if facts.get(key) is not None}
    return schema


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


def texts_of(info: dict[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Names and tooltips of a node of `/object_info`: of its inputs, and of its outputs."""
    groups = (info["input"].get(group, {}) for group in ("required", "optional"))  # there are hidden ones, too
    inputs = [(name, entry[1]["tooltip"]) for group in groups for name, entry in group.items()]
    return inputs, list(zip(info["output_name"], info["output_tooltips"], strict=True))


def main(address: str) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{address.rstrip('/')}/object_info", timeout=60) as answer:
        info: dict[str, Any] = json.load(answer)
    schemas: dict[str, Schema] = json.loads(OWN_SCHEMAS.read_text(encoding="utf-8"))
    for name in info:
        if name.startswith("WanCore"):
            schemas[name] = extended(schemas.get(name), schema_of(info[name]))
            page = PAGES / f"{name}.md"
            page.write_text(with_lists(page.read_text(encoding="utf-8"), *texts_of(info[name])), encoding="utf-8")
    OWN_SCHEMAS.write_text(written(schemas), encoding="utf-8")
    write_chinese_pages()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_chinese_pages() if sys.argv[1] == "--chinese" else main(sys.argv[1])
