"""Derive the API form of the workflows, `workflows/api/<name>.json`, from what ComfyUI's page saved in `workflows/`.

    python -m tools.workflows             write the API forms
    python -m tools.workflows --check     exit 1, naming the files, if one is not what this would write
    python -m tools.workflows --native http://127.0.0.1:8188
                                          first learn those of ComfyUI's own nodes that are not described yet

A node's inputs are in tests/nodes/node_schemas.json and tools/native_nodes.json. ComfyUI's own nodes stay
described as the oldest ComfyUI has them: newer ones add inputs and outputs, and take a graph without them.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.templates.expand import expand

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / "workflows"
OWN_SCHEMAS, NATIVE_SCHEMAS = ROOT / "tests" / "nodes" / "node_schemas.json", ROOT / "tools" / "native_nodes.json"
UPLOADS = ("image_upload", "audio_upload")  # marks of inputs that list the files of one machine
FILE_LISTS = ("clip_name", "audio_encoder_name")  # inputs that do so without a mark

Schema = dict[str, Any]


def pages() -> dict[str, Path]:
    """Name of the API form -> the page's form, whose file name is the title in ComfyUI's template browser."""
    return {
        path.stem.lower().replace("wan 2.", "wan2").replace(" ", "_"): path for path in sorted(WORKFLOWS.glob("*.json"))
    }


def api_forms() -> dict[Path, str]:
    """File below `workflows/api` -> what it should hold."""
    info = {name: _info(schema) for name, schema in read_schemas().items()}
    files = {}
    for name, path in pages().items():
        graph = expand(json.loads(path.read_text(encoding="utf-8")), info)
        files[WORKFLOWS / "api" / f"{name}.json"] = json.dumps(graph, indent=1, ensure_ascii=False) + "\n"
    return files


def read_schemas() -> dict[str, Schema]:
    """Node id -> {"inputs": [{"name", "type", "optional", "default"?, ...}], "outputs": [{"name", "type"}]}, this
    pack's and those of ComfyUI that the workflows use."""
    return {**json.loads(NATIVE_SCHEMAS.read_text()), **json.loads(OWN_SCHEMAS.read_text())}


def _info(schema: Schema) -> dict[str, Any]:
    """The schema as `/object_info` has it. A workflow that was saved before an optional input was added lacks it."""
    inputs = {}
    for entry in schema["inputs"]:
        inputs[entry["name"]] = (
            entry["type"],
            {k: v for k, v in entry.items() if k != "default" or not entry["optional"]},
        )
    return {"input": {"required": inputs}}


def native_schema(info: dict[str, Any]) -> Schema:
    """The schema of a node of `/object_info`."""
    inputs = []
    for group in ("required", "optional"):
        for name in info["input_order"].get(group, []):
            kind, *rest = info["input"][group][name]
            settings = rest[0] if rest else {}
            options = kind if isinstance(kind, list) else settings.get("options")
            entry: dict[str, Any] = {"name": name, "type": "COMBO" if isinstance(kind, list) else kind}
            entry["optional"] = group == "optional"
            entry |= {key: settings[key] for key in ("default", "multiline", *UPLOADS) if key in settings}
            of_one_machine = name in FILE_LISTS or any(settings.get(key) for key in UPLOADS)
            if options is not None and not of_one_machine:
                entry["options"] = options
            inputs.append(entry)
    outputs = [{"name": name, "type": kind} for name, kind in zip(info["output_name"], info["output"], strict=True)]
    return {"inputs": inputs, "outputs": outputs}


def learn(address: str) -> None:
    """Add the schemas of ComfyUI's own nodes that the workflows use and that are not described yet."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{address.rstrip('/')}/object_info", timeout=60) as answer:
        info: dict[str, Any] = json.load(answer)
    schemas, described = json.loads(NATIVE_SCHEMAS.read_text()), read_schemas()
    kinds = {node["type"] for path in pages().values() for node in json.loads(path.read_text())["nodes"]}
    schemas |= {kind: native_schema(info[kind]) for kind in kinds if kind in info and kind not in described}
    rows = [f" {json.dumps(name)}: {json.dumps(schemas[name])}" for name in sorted(schemas)]
    NATIVE_SCHEMAS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not current")
    parser.add_argument("--native", metavar="URL", help="a running ComfyUI, to learn its own nodes from")
    options = parser.parse_args(argv)
    if options.native:
        learn(options.native)
    files = api_forms()
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    unknown = [path for path in sorted((WORKFLOWS / "api").glob("*.json")) if path not in files]
    names = ", ".join(str(path.relative_to(ROOT)) for path in [*stale, *unknown])
    if options.check:
        if names:
            print(f"not what the page's form says: {names}. Run python -m tools.workflows", file=sys.stderr)
        return bool(names)
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
    print(f"wrote {names or 'nothing: all files are current'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
