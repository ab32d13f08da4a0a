"""What the nodes declare, read without ComfyUI: a recorder stands in place of its `io` module."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

OF_COMFYUI = (["euler"], ["simple"])  # samplers and schedulers differ between its versions: the file has none
TYPES = {"Combo": "COMBO", "Int": "INT", "Float": "FLOAT", "String": "STRING", "Boolean": "BOOLEAN", "Clip": "CLIP"}
TYPES |= {"Vae": "VAE", "Latent": "LATENT", "Image": "IMAGE", "Conditioning": "CONDITIONING"}
TYPES |= {"ClipVisionOutput": "CLIP_VISION_OUTPUT", "Audio": "AUDIO", "Video": "VIDEO", "Model": "MODEL"}
TYPES |= {"Sigmas": "SIGMAS", "Mask": "MASK", "AudioEncoderOutput": "AUDIO_ENCODER_OUTPUT"}
TYPES |= {"WanCameraEmbedding": "WAN_CAMERA_EMBEDDING", "ClipVision": "CLIP_VISION"}


class Declared(dict[str, Any]):
    """An input as it was declared."""

    io_type = ""

    def __init__(self, id: str, advanced: bool = False, **options: Any) -> None:
        super().__init__({"name": id, "type": self.io_type, **options, "advanced": advanced})

    @property
    def id(self) -> str:
        return self["name"]

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Recorder:
    """Stands for a socket type: `Input` and `Output` keep what they are given."""

    def __init__(self, io_type: str) -> None:
        self.io_type = io_type
        self.Input = type(f"{io_type}Input", (Declared,), {"io_type": io_type})

    def Output(self, id: str, display_name: str, **options: Any) -> dict[str, Any]:
        return {"id": id, "name": display_name, "type": self.io_type, **options}


class NewestSchema(types.SimpleNamespace):
    __dataclass_fields__ = ("search_aliases", "has_intermediate_output")


def modules(files: Mapping[str, list[str]] | None = None) -> dict[str, types.ModuleType]:
    """What `nodes` imports of ComfyUI, empty but for what its module bodies and schemas touch. files: of each of its
    folders of models."""
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
        "folder_paths": {
            "get_filename_list": lambda folder: (files or {}).get(folder, []),
            "get_folder_paths": lambda _: [],
        },
        "server": {"PromptServer": object},
    }
    io = types.SimpleNamespace(**{name: Recorder(kind) for name, kind in TYPES.items()})
    io.Hidden = types.SimpleNamespace(prompt=None, unique_id=None)
    io.Custom, io.ComfyNode, io.Schema = Recorder, object, NewestSchema
    plain["comfy_api.latest"] = {"io": io, "ui": None, "ComfyExtension": object, "InputImpl": None}
    for name, contents in plain.items():
        vars(stubs[name]).update(contents)
    return stubs


@contextmanager
def without_comfyui(files: Mapping[str, list[str]] | None = None) -> Iterator[Any]:
    """The package of nodes, imported anew, whose `io` records what it is given. files: as `modules` has them."""
    stubs = modules(files)

    def taken_out() -> dict[str, types.ModuleType]:
        ours = [name for name in sys.modules if name in stubs or name.partition(".")[0] == "nodes"]
        return {name: sys.modules.pop(name) for name in ours}

    before = taken_out()
    sys.modules.update(stubs)
    try:
        yield importlib.import_module("nodes")
    finally:
        taken_out()
        sys.modules.update(before)


def declared(files: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
    """Node id -> schema."""
    with without_comfyui(files) as nodes:
        return {schema.node_id: schema for schema in (node.define_schema() for node in nodes.NODES)}
