"""Shared workflows go on working: from the first release on, ids, inputs, order, defaults and sockets of the nodes are
frozen in `node_schemas.json`: `tools/make_schemas.py` adds what is new at the end, and the declarations equal the file.
They are read without ComfyUI (`tools.declared_nodes`).
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools.declared_nodes import declared
from tools.make_schemas import RELEASE, extended, schema_of

CATEGORIES = {f"WanCore/{part}" for part in ("load", "prompt", "sample", "speed", "control", "tools")}
FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "node_schemas.json").read_text())
FILES = {
    "diffusion_models": [
        "one.safetensors",
        "big/part-00001-of-00002.safetensors",
        "big/part-00002-of-00002.safetensors",
    ]
}


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    """Node id -> schema."""
    return declared(FILES)


def test_optional_inputs_are_declared_last(schemas: dict[str, Any]) -> None:
    """The page shows them last."""
    for name, schema in schemas.items():
        required = [not entry.get("optional", False) for entry in schema.inputs]
        assert required == sorted(required, reverse=True), name


def test_the_file_has_all_that_is_declared() -> None:
    """tools/make_schemas.py writes it."""
    for name, node in declared().items():
        assert schema_of(node) == FROZEN[name], name


def test_what_is_released_stays() -> None:
    """From the first dated chapter of the changelog on, only what is new is written."""
    kept = {"name": "steps", "type": "INT", "default": 20}
    choice = {"name": "mode", "type": "COMBO", "options": ["a"]}
    before: dict[str, Any] = {"inputs": [kept, choice], "outputs": [{"name": "model", "type": "MODEL"}]}
    now = {"inputs": [{**choice, "options": ["a", "b"]}, {**kept, "default": 8}, {"name": "new"}], "outputs": []}
    inputs = [kept, {**choice, "options": ["a", "b"]}, {"name": "new"}]
    assert extended(before, now) == {"inputs": inputs, "outputs": before["outputs"]}
    assert RELEASE.search("# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - unreleased\n") is None
    assert RELEASE.search("# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2030-01-02\n")


def test_steps_and_rounding_fit_the_range(schemas: dict[str, Any]) -> None:
    for name, schema in schemas.items():
        for entry in (one for one in schema.inputs if "min" in one):
            low, step, finest = entry["min"], entry.get("step", 0), entry.get("round", 0)
            assert low <= entry["default"] <= entry["max"] and step <= entry["max"] - low, (name, entry["name"])
            assert finest <= (step or finest), (name, entry["name"])


def test_names_of_inputs_and_outputs_do_not_meet(schemas: dict[str, Any]) -> None:
    """ComfyUI 0.3.64 refuses a node in which an input and an output have one id."""
    for schema in schemas.values():
        ids = [entry["name"] for entry in schema.inputs] + [entry["id"] for entry in schema.outputs]
        assert len(ids) == len(set(ids)), schema.node_id


def test_everything_is_explained(schemas: dict[str, Any]) -> None:
    for schema in schemas.values():
        assert schema.node_id.startswith("WanCore") and schema.category in CATEGORIES and schema.description
        assert all(entry.get("tooltip") for entry in [*schema.inputs, *schema.outputs]), schema.node_id


def test_every_socket_of_this_pack_has_a_colour(schemas: dict[str, Any]) -> None:
    script = (Path(__file__).resolve().parents[2] / "web" / "js" / "colours.js").read_text(encoding="utf-8")
    entries = (entry for schema in schemas.values() for entry in [*schema.inputs, *schema.outputs])
    kinds = (kind for entry in entries for kind in entry["type"].split(","))
    assert {kind for kind in kinds if kind.startswith("WANCORE_")} == set(
        re.findall(r"  (WANCORE_\w+): \"#\w{6}\"", script)
    )


def test_shards_appear_as_one_entry_and_the_embedded_model_first(schemas: dict[str, Any]) -> None:
    options = schemas["WanCoreModelLoader"].inputs[0]["options"]
    assert options == ["tiny (embedded)", "tiny i2v (embedded)", "tiny animate 2 (embedded)", "one.safetensors", "big/"]


def test_the_pack_imports_nothing_of_comfyui_before_its_entry_point() -> None:
    spec = importlib.util.spec_from_file_location("pack", Path(__file__).resolve().parents[2] / "__init__.py")
    assert spec is not None and spec.loader is not None
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    assert callable(pack.comfy_entrypoint) and not hasattr(pack, "NODE_CLASS_MAPPINGS")
    assert (Path(__file__).resolve().parents[2] / pack.WEB_DIRECTORY).is_dir()
