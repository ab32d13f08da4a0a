"""Run by ComfyUI's Python: wrong values in every widget of every node, through ComfyUI's own validation of prompts and,
as a link brings them, into the node. Prints one JSON object on its last line: how many were tried, how many of them
passed, and the faults: what ended in something other than a result or a sentence of this pack or of ComfyUI.

    python native_values.py COMFYUI_PATH [NODE ...]
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
world = importlib.import_module("native_models")

NAN, INF, HUGE = float("nan"), float("inf"), 10**30
VALUES: list[Any] = [None, [], [1, 2, 3], {"__value__": [1, 2]}, {"__value__": ["1", 0]}, {}, {"a": 1}, NAN, INF,
                     1e300, -1e300, HUGE, -HUGE, True, False, "", "x", -1, 2.5]  # fmt: skip
WIDGETS = ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO")
SMALL = {"width": 48, "height": 48, "frames": 5, "steps": 1, "settings": "entered here", "solver": "euler"}
STARTS = {"WanCoreLauncher", "WanCoreReportCard"}  # processes and minutes of measuring: their widgets are checked alone


class Source:
    """Gives a socket's type; never runs."""

    FUNCTION, CATEGORY = "run", "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}


class Sink(Source):
    OUTPUT_NODE, RETURN_TYPES = True, ()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"any": ("*",)}}


def sockets() -> dict[str, Any]:
    """A real object for each type of socket that a node needs."""
    import torch

    loaders, models = (importlib.import_module(f"pack.nodes.{name}") for name in ("part_loaders", "model_loader"))
    from wan_core.execution.report import Report

    tiny = "tiny (embedded)"
    made = [
        loaders.WanCoreTextEncoderLoader.execute(tiny, "checkpoint"),
        loaders.WanCoreVAELoader.execute(tiny, "fp32"),
        models.WanCoreModelLoader.execute(tiny, tiny, precision="fp32", attention="sdpa", residency="auto"),
    ]
    clip, vae, model = (asyncio.run(one).result[0] for one in made)
    pictures = torch.rand(5, 48, 48, 3)
    return {
        "CLIP": clip, "VAE": vae, "WANCORE_MODEL": model, "MODEL": world.tiny("WAN21_T2V"),
        "CONDITIONING": clip.encode_from_tokens_scheduled(clip.tokenize("a red circle")),
        "LATENT": {"samples": torch.zeros(1, 16, 2, 6, 6)}, "IMAGE": pictures, "MASK": pictures[..., 0],
        "WANCORE_REPORT": Report(torch.device("cpu")), "CLIP_VISION_OUTPUT": world.Clip(),
        "AUDIO_ENCODER_OUTPUT": {"encoded_audio_all_layers": [world.rows(1, 20, 1024)] * 25, "audio_samples": 16000},
    }  # fmt: skip


def outside(fault: BaseException) -> str:
    """What a fault is, where it is no sentence of the pack; "" for one that is."""
    from wan_core.config import UserError

    return "" if isinstance(fault, UserError) else f"{type(fault).__name__}: {str(fault)[:200]}"


def refusals(prompt: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether ComfyUI takes a prompt, and exceptions in its validation that are not the pack's."""
    import execution

    valid, error, _, by_node = asyncio.run(execution.validate_prompt("1", prompt, None))
    errors = [one for node in by_node.values() for one in node["errors"]] + ([] if valid else [error])
    kinds = [(one.get("extra_info") or {}).get("exception_type", "") for one in errors]
    return valid, [f"{kind}: {one['details']}" for kind, one in zip(kinds, errors, strict=True)
                   if kind and not kind.startswith("wan_core.")]  # fmt: skip


def run(node: Any, inputs: dict[str, Any]) -> str:
    """What is wrong with what came of it."""
    own = node.PREPARE_CLASS_CLONE({"hidden_inputs": {}})
    try:
        returned = own.execute(**inputs)
        if inspect.isawaitable(returned):
            asyncio.run(returned)
    except Exception as fault:  # noqa: BLE001 - told to the test
        return outside(fault)
    return ""


def try_node(node: Any, objects: dict[str, Any], found: dict[str, Any]) -> None:
    schema = node.GET_SCHEMA()
    name = schema.node_id
    widgets = {one.id: one for one in schema.inputs if one.get_io_type() in WIDGETS}
    needed = [one for one in schema.inputs if one.id not in widgets and not one.optional]
    links = {one.id: [one.get_io_type().partition(",")[0], 0] for one in needed}  # the first of several types
    given = {key: objects[kind] for key, (kind, _) in links.items()}
    usual = {key: SMALL.get(key, one.default) for key, one in widgets.items()}
    usual = {key: widgets[key].options[0] if value is None else value for key, value in usual.items()}
    for widget in widgets:
        for value in VALUES:
            found["tried"] += 1
            prompt = {kind: {"class_type": f"Source {kind}", "inputs": {}} for kind, _ in links.values()}
            prompt |= {
                "node": {"class_type": name, "inputs": {**links, **usual, widget: copy.deepcopy(value)}},
                "sink": {"class_type": "Sink", "inputs": {"any": ["node", 0]}},
            }
            valid, faults = refusals(prompt)
            raw = value["__value__"] if isinstance(value, dict) and "__value__" in value else value
            through = [{key: prompt["node"]["inputs"][key] for key in widgets}] if valid else []  # as converted
            for values in [*through, {**usual, widget: raw}]:
                begin = time.perf_counter()
                try:
                    faults += [run(node, {**given, **values})] if name not in STARTS else []
                finally:
                    seconds = time.perf_counter() - begin
                faults += [f"{seconds:.1f} s"] if seconds > 20 else []
            found["passed"] += valid
            found["faults"] += [f"{name}.{widget} = {value!r:.40}: {one}" for one in faults if one]


if __name__ == "__main__":
    pack = world.set_up(sys.argv[1])
    import folder_paths
    import server
    import torch

    import nodes

    server.PromptServer.instance = SimpleNamespace(client_id=None, sockets_metadata={}, send_progress_text=print)
    found: dict[str, Any] = {"tried": 0, "passed": 0, "faults": []}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        folder_paths.set_temp_directory(folder)
        folder_paths.set_output_directory(folder)
        objects = sockets()
        for kind in (*objects, "WANCORE_SKIPPING", "AUDIO", "SIGMAS"):
            nodes.NODE_CLASS_MAPPINGS[f"Source {kind}"] = type(f"Source{kind}", (Source,), {"RETURN_TYPES": (kind,)})
        nodes.NODE_CLASS_MAPPINGS["Sink"] = Sink
        for node in pack.NODES:
            nodes.NODE_CLASS_MAPPINGS[node.GET_SCHEMA().node_id] = node
        for node in pack.NODES:
            if len(sys.argv) < 3 or node.GET_SCHEMA().node_id in sys.argv[2:]:
                begin = time.perf_counter()
                try_node(node, objects, found)
                print(node.GET_SCHEMA().node_id, f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    print("\n" + json.dumps(found))
