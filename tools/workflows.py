"""Derive from the workflows, as ComfyUI's page saved them in `workflows/`, what is made of them.

    python -m tools.workflows             write all of it
    python -m tools.workflows --check     exit 1, naming the files, if one is not what this would write
    python -m tools.workflows --native http://127.0.0.1:8188
                                          first learn those of ComfyUI's own nodes that are not described yet

Made are the API form of each, `workflows/api/<name>.json`; the addresses of the files that its loaders name, in
`properties.models` of the loader, by which ComfyUI offers to download them (from wan_core/assets/models.json); and
`subgraphs/<name>.json`, the boxes of four templates, which ComfyUI offers as blueprints. `workflows/*.json` are the
templates of ComfyUI's browser; those in `workflows/more/` are graphs of other tasks, for the API and for
dropping on the page.

A node's inputs are in tests/nodes/node_schemas.json and tools/native_nodes.json. ComfyUI's own nodes stay
described as the oldest ComfyUI has them: newer ones add inputs and outputs, and take a graph without them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.templates.expand import expand
from wan_core.config.model_files import ModelFile, model_files

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / "workflows"
OWN_SCHEMAS, NATIVE_SCHEMAS = ROOT / "tests" / "nodes" / "node_schemas.json", ROOT / "tools" / "native_nodes.json"
UPLOADS = ("image_upload", "audio_upload")  # marks of inputs that list the files of one machine
FILE_LISTS = ("clip_name", "audio_encoder_name")  # inputs that do so without a mark

Schema = dict[str, Any]


TITLE = re.compile(r"(?=.{,30}$)(Wan 2\.2|Toy) .+")  # the model first; the browser cuts names after 30 letters
BLUEPRINTS = (
    "Wan 2.2 I2V 4 steps",
    "Wan 2.2 T2V 4 steps",
    "Wan 2.2 I2V first, last frame",
    "Wan 2.2 5B text or picture",
)


def api_name(title: str) -> str:
    return title.lower().replace("wan 2.", "wan2").replace(",", "").replace(" ", "_")


def pages() -> dict[str, Path]:
    """Name of the API form -> the page's form, whose file name is the title in ComfyUI's template browser."""
    return {api_name(path.stem): path for path in sorted([*WORKFLOWS.glob("*.json"), *WORKFLOWS.glob("more/*.json")])}


def all_nodes(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of the workflow and of its subgraphs."""
    for graph in (page, *page.get("definitions", {}).get("subgraphs", [])):
        yield from graph["nodes"]


def known_files() -> dict[str, ModelFile]:
    return {one.name: one for one in model_files()}


def files_of(node: dict[str, Any]) -> list[str]:
    """The model files that a node's widgets name."""
    values = node.get("widgets_values") or []
    return list(dict.fromkeys(one for one in values if re.fullmatch(r"\S+\.(safetensors|gguf)", str(one))))


def with_addresses(page: dict[str, Any]) -> dict[str, Any]:
    """The workflow with the addresses of what its loaders name. Raises KeyError for a file that is not in the table."""
    files, boxes = known_files(), {one["id"] for one in page.get("definitions", {}).get("subgraphs", [])}
    for node in all_nodes(page):
        node["properties"].pop("models", None)
        if (names := files_of(node)) and node["type"] not in boxes:
            node["properties"]["models"] = [
                {"name": name, "url": files[name].address, "directory": files[name].folder} for name in names
            ]
    return page


def blueprint(page: dict[str, Any]) -> dict[str, Any]:
    """The workflow's box alone."""
    [subgraph] = page["definitions"]["subgraphs"]
    [box] = (node for node in page["nodes"] if node["type"] == subgraph["id"])
    alone = {
        **box,
        "pos": [0, 0],
        "order": 0,
        "inputs": [{**one, "link": None} for one in box["inputs"]],
        "outputs": [{**one, "links": None} for one in box["outputs"]],
    }
    return {**page, "nodes": [alone], "links": [], "groups": [], "extra": {}, "last_node_id": box["id"]}


def derived() -> dict[Path, str]:
    """File -> what it should hold."""
    info = {name: _info(schema) for name, schema in read_schemas().items()}
    files = {}
    for name, path in pages().items():
        page = with_addresses(json.loads(path.read_text(encoding="utf-8")))
        files[path] = _text(page)
        files[WORKFLOWS / "api" / f"{name}.json"] = _text(expand(page, info))
        if path.stem in BLUEPRINTS:
            files[ROOT / "subgraphs" / f"WanCore {path.stem}.json"] = _text(blueprint(page))
    return files


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


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
            kind, *details = info["input"][group][name]
            settings = details[0] if details else {}
            options = kind if isinstance(kind, list) else settings.get("options")
            entry: dict[str, Any] = {"name": name, "type": "COMBO" if isinstance(kind, list) else kind}
            entry["optional"] = group == "optional"
            entry |= {
                key: settings[key]
                for key in ("default", "multiline", "control_after_generate", *UPLOADS)
                if key in settings
            }
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
    kinds = {node["type"] for path in pages().values() for node in all_nodes(json.loads(path.read_text()))}
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
    files = derived()
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    written = [*(WORKFLOWS / "api").glob("*.json"), *(ROOT / "subgraphs").glob("*.json")]
    unknown = [path for path in sorted(written) if path not in files]
    names = ", ".join(str(path.relative_to(ROOT)) for path in [*stale, *unknown])
    if options.check:
        if names:
            print(
                f"not what the pages' forms and the table of models say: {names}. Run python -m tools.workflows",
                file=sys.stderr,
            )
        return bool(names)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    print(f"wrote {names or 'nothing: all files are current'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
