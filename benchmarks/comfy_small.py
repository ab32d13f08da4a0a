"""Graphs as they run on a CPU, on the small files that `comfy_files` writes there.

ComfyUI's text encoder has one size, so a node of `templates/stand_ins.py` gives random text rows in its place. Kernels
that need a GPU are replaced by those that the device has.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from benchmarks.comfyui import Graph, node

STAND_INS, CORE_SPARSE = (
    {name: (Path(__file__).parent / "templates" / f"{name}.py").read_text(encoding="utf-8")}
    for name in ("stand_ins", "core_sparse")
)
GPU_ATTENTION = ("cudnn-fp8", "int8")


def small_graph(graph: Graph) -> Graph:
    """The graph with stand-ins for the text encoder, and with attention that a CPU has."""
    made = deepcopy(graph)
    for name, one in graph.items():
        if one["class_type"] == "CLIPTextEncode":
            made[name] = node("StandInText", text=one["inputs"]["text"])
        elif one["class_type"] == "WanCoreTextEncode":
            made[name] = node("StandInText", text=one["inputs"]["positive"])
            made[f"{name}.negative"] = node("StandInText", text=one["inputs"]["negative"])
            relink(made, [name, 1], [f"{name}.negative", 0])
        elif one["inputs"].get("attention") in GPU_ATTENTION and one["class_type"].startswith("WanCore"):
            made[name]["inputs"]["attention"] = "auto"
    made.pop("loaders.text", None)
    return made


def relink(graph: Graph, old: list[object], new: list[object]) -> None:
    for one in graph.values():
        one["inputs"] = {key: new if value == old else value for key, value in one["inputs"].items()}
