"""Bring the files that repeat what nodes say up to date, from a running ComfyUI that has this pack.

    python tools/make_schemas.py http://127.0.0.1:8188

It adds new nodes and new inputs to tests/nodes/node_schemas.json; what is there already stays as it is: the tests
compare the nodes with it. And it writes the tables of web/docs, whose rows are the tooltips. The texts in other
languages (locales) are written by hand; `tests/nodes/test_locales.py` says what is missing in them. Start that ComfyUI
without models of its own, or their names would be written.
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
PAGES = Path(__file__).resolve().parents[1] / "web" / "docs"


def schema_of(info: dict[str, Any]) -> Schema:
    """A node of `/object_info`, as the file has it."""
    made = native_schema(info)
    inputs = {name: entry for group in info["input"].values() for name, entry in group.items()}
    for entry in made["inputs"]:
        facts = inputs[entry["name"]][1] if len(inputs[entry["name"]]) > 1 else {}
        entry |= {key: facts[key] for key in KEYS if facts.get(key) is not None}
    return made


def extended(before: Schema | None, now: Schema) -> Schema:
    """What was frozen, and what is new behind it. A combo has its new values, unless it lost one: a test says so."""
    if before is None:
        return now
    both = {}
    for kind in ("inputs", "outputs"):
        known = {entry["name"]: entry for entry in before[kind]}
        for entry in now[kind]:
            options = known.get(entry["name"], {}).get("options")
            if options is not None and set(options) <= set(entry.get("options", ())):
                known[entry["name"]]["options"] = entry["options"]
        both[kind] = [*before[kind], *(entry for entry in now[kind] if entry["name"] not in known)]
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


def with_tables(page: str, inputs: Iterable[tuple[str, str]], outputs: Iterable[tuple[str, str]]) -> str:
    """A page of web/docs with the tables of these names and tooltips, in which 'words' become `words`."""
    for kind, entries in (("input", inputs), ("output", outputs)):
        texts = {name: re.sub(r"(?<!\w)'([^']+)'(?!\w)", r"`\1`", tooltip) for name, tooltip in entries}
        rows = "".join(f"| `{name}` | {text} |\n" for name, text in texts.items())
        table = f"| {kind} | what it is |\n|---|---|\n"
        page = re.sub(re.escape(table) + r"(\|.*\n)*", lambda _, rows=table + rows: rows, page)
    return page


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
            page.write_text(with_tables(page.read_text(encoding="utf-8"), *texts_of(info[name])), encoding="utf-8")
    OWN_SCHEMAS.write_text(written(schemas), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
