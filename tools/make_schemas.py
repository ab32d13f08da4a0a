"""Add to tests/nodes/node_schemas.json what a running ComfyUI that has this pack says of new nodes and new inputs.

    python tools/make_schemas.py http://127.0.0.1:8188

What is there already stays as it is: the tests compare the nodes with it. Start that ComfyUI without models of its own,
or their names would be written.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.workflows import OWN_SCHEMAS, Schema, native_schema

KEYS = ("default", "multiline", "control_after_generate")


def schema_of(info: dict[str, Any]) -> Schema:
    """A node of `/object_info`, as the file has it."""
    made = native_schema(info)
    given = {name: entry for group in info["input"].values() for name, entry in group.items()}
    for entry in made["inputs"]:
        told = given[entry["name"]][1] if len(given[entry["name"]]) > 1 else {}
        entry |= {key: told[key] for key in KEYS if told.get(key) is not None}
    return made


def extended(before: Schema | None, now: Schema) -> Schema:
    """What was frozen, and what is new behind it."""
    if before is None:
        return now
    both = {}
    for kind in ("inputs", "outputs"):
        known = {entry["name"] for entry in before[kind]}
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


def main(address: str) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{address.rstrip('/')}/object_info", timeout=60) as answer:
        info: dict[str, Any] = json.load(answer)
    schemas: dict[str, Schema] = json.loads(OWN_SCHEMAS.read_text(encoding="utf-8"))
    for name in info:
        if name.startswith("WanCore"):
            schemas[name] = extended(schemas.get(name), schema_of(info[name]))
    OWN_SCHEMAS.write_text(written(schemas), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
