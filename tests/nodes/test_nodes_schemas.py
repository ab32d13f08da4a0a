"""Shared workflows go on working: ids, inputs, order, defaults and sockets of the nodes are frozen, and only additions
at the end, optional ones, pass.

`node_schemas.json` is what ComfyUI's `/object_info` said when this version was made (`test_nodes_comfy.py` compares
with a real one). Here the declarations are read without ComfyUI, through a recorder in place of its `io` module.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CATEGORIES = {f"WanCore/{part}" for part in ("load", "prompt", "sample", "speed", "control", "tools")}
FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "node_schemas.json").read_text())
TYPES = {"Combo": "COMBO", "Int": "INT", "Float": "FLOAT", "String": "STRING", "Boolean": "BOOLEAN", "Clip": "CLIP"}
TYPES |= {"Vae": "VAE", "Latent": "LATENT", "Image": "IMAGE", "Conditioning": "CONDITIONING"}
TYPES |= {
    "ClipVision": "CLIP_VISION",
    "ClipVisionOutput": "CLIP_VISION_OUTPUT",
    "Audio": "AUDIO",
    "Video": "VIDEO",
    "Model": "MODEL",
}
TYPES |= {"Sigmas": "SIGMAS", "Mask": "MASK", "AudioEncoderOutput": "AUDIO_ENCODER_OUTPUT"}
TYPES |= {"WanCameraEmbedding": "WAN_CAMERA_EMBEDDING", "ClipVision": "CLIP_VISION"}


class Recorder:
    """Stands for a socket type: `Input` and `Output` keep what they are given."""

    def __init__(self, io_type: str) -> None:
        self.io_type = io_type

    def Input(self, id: str, **options: Any) -> dict[str, Any]:
        return {"name": id, "type": self.io_type, **options}

    def Output(self, id: str, display_name: str, **options: Any) -> dict[str, Any]:
        return {"id": id, "name": display_name, "type": self.io_type, **options}


class NewestSchema(types.SimpleNamespace):
    __dataclass_fields__ = ("search_aliases", "has_intermediate_output")


def modules() -> dict[str, types.ModuleType]:
    """What `nodes` imports of ComfyUI, empty but for what its module bodies and schemas touch."""
    stubs = {
        name: types.ModuleType(name)
        for name in ("comfy", "comfy.model_management", "comfy.model_patcher", "comfy.utils", "comfy_execution")
    }
    names = ("comfy.patcher_extension", "comfy.samplers", "comfy_execution.utils", "comfy_execution.progress")
    for name in (*names, "folder_paths", "server", "comfy_api", "comfy_api.feature_flags", "comfy_api.latest"):
        stubs[name] = types.ModuleType(name)
    plain = {
        "comfy": {"model_management": stubs["comfy.model_management"]},
        "comfy.model_patcher": {"ModelPatcher": object},
        "comfy.patcher_extension": {"WrappersMP": object, "add_wrapper_with_key": None},
        "comfy.samplers": {"KSampler": types.SimpleNamespace(SAMPLERS=OF_COMFYUI[0], SCHEDULERS=OF_COMFYUI[1])},
        "comfy.utils": {"ProgressBar": object},
        "comfy_execution.utils": {"get_executing_context": None},
        "comfy_execution.progress": {"get_progress_state": None},
        "comfy_api.feature_flags": {"supports_feature": None},
        "folder_paths": {"get_filename_list": lambda folder: FILES.get(folder, []), "get_folder_paths": lambda _: []},
        "server": {"PromptServer": object},
    }
    io = types.SimpleNamespace(**{name: Recorder(kind) for name, kind in TYPES.items()})
    io.Hidden = types.SimpleNamespace(prompt=None, unique_id=None)
    io.Custom, io.ComfyNode, io.Schema = Recorder, object, NewestSchema
    plain["comfy_api.latest"] = {"io": io, "ui": None, "ComfyExtension": object, "InputImpl": None}
    for name, contents in plain.items():
        vars(stubs[name]).update(contents)
    return stubs


OF_COMFYUI = (["euler"], ["simple"])  # samplers and schedulers differ between its versions: the file has none
FILES = {
    "diffusion_models": [
        "one.safetensors",
        "big/part-00001-of-00002.safetensors",
        "big/part-00002-of-00002.safetensors",
    ]
}


@contextmanager
def without_comfyui() -> Iterator[Any]:
    """The package of nodes, whose `io` records what it is given."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "nodes"]:
            patch.delitem(sys.modules, name)
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("nodes")
        for name in [name for name in sys.modules if name.partition(".")[0] == "nodes"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    """Node id -> schema."""
    with without_comfyui() as nodes:
        return {schema.node_id: schema for schema in (node.define_schema() for node in nodes.NODES)}


def test_nothing_that_was_shared_is_gone(schemas: dict[str, Any]) -> None:
    assert set(FROZEN) <= set(schemas)


@pytest.mark.parametrize("name", FROZEN)
def test_inputs_only_grow_at_the_end(schemas: dict[str, Any], name: str) -> None:
    inputs, frozen = schemas[name].inputs, FROZEN[name]["inputs"]
    for now, before in zip(inputs, frozen, strict=False):
        for key in ("name", "type", "default", "optional", "control_after_generate"):
            assert now.get(key, False) == before.get(key, False), f"{name}.{before['name']}: {key}"
        gone = [option for option in before.get("options", []) if option not in now["options"]]
        assert not gone, f"{name}.{before['name']} lost {gone}"
    assert len(inputs) >= len(frozen)
    # a prompt saved without the addition must still pass validation
    assert all(added.get("optional") for added in inputs[len(frozen) :])
    required = [not entry.get("optional", False) for entry in inputs]
    assert required == sorted(required, reverse=True), "the page shows optional inputs last: declare them last"


@pytest.mark.parametrize("name", FROZEN)
def test_combos_are_those_of_the_file(schemas: dict[str, Any], name: str) -> None:
    """A value that is new, and one in another place: tools/make_schemas.py writes them into the file. Files that a
    machine has are left out."""
    ours = [name for names in FILES.values() for name in (*names, *(f"{Path(one).parent}/" for one in names))]
    combos = {
        entry["name"]: [option for option in entry["options"] if option not in ours]
        for entry in schemas[name].inputs
        if entry["type"] == "COMBO" and entry["options"] not in OF_COMFYUI
    }
    assert combos == {entry["name"]: entry["options"] for entry in FROZEN[name]["inputs"] if "options" in entry}


def test_steps_and_rounding_fit_the_range(schemas: dict[str, Any]) -> None:
    for name, schema in schemas.items():
        for entry in (one for one in schema.inputs if "min" in one):
            low, step, finest = entry["min"], entry.get("step", 0), entry.get("round", 0)
            assert low <= entry["default"] <= entry["max"] and step <= entry["max"] - low, (name, entry["name"])
            assert finest <= (step or finest), (name, entry["name"])


@pytest.mark.parametrize("name", FROZEN)
def test_outputs_only_grow_at_the_end(schemas: dict[str, Any], name: str) -> None:
    outputs = [(entry["name"], entry["type"]) for entry in schemas[name].outputs]
    frozen = [(entry["name"], entry["type"]) for entry in FROZEN[name]["outputs"]]
    assert outputs[: len(frozen)] == frozen


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
    kinds = {entry["type"] for schema in schemas.values() for entry in [*schema.inputs, *schema.outputs]}
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


@pytest.mark.parametrize(
    "search_term", ["wan fast", "sage", "teacache", "magcache", "block swap", "speed", "faster", "vram"]
)
def test_words_that_people_search_for_find_a_node(schemas: dict[str, Any], search_term: str) -> None:
    """ComfyUI's search takes them where its schemas have `search_aliases`."""
    assert any(search_term in schema.search_aliases for schema in schemas.values())
