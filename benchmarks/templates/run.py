"""ComfyUI's official Wan templates on random weights, in a real ComfyUI.

Templates come from the package comfyui-workflow-templates-json of its Python. They run as the page would send them,
except: few steps, pixels and frames; VAE with 8 channels and transformers of few layers, written under the names that
the template asks for; text, vision, audio and segmentation encoders, which have one size only, and pictures are
replaced by nodes that give random tensors of the right shape (`stand_ins.py`); videos are not decoded or saved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.comfy_small import STAND_INS
from benchmarks.comfyui import ComfyUI, Graph, make_base, node, python_of
from benchmarks.templates.expand import expand
from benchmarks.templates.our_sampler import OURS, SAMPLERS

HERE = Path(__file__).resolve().parent
# Template -> kind of its transformers (`files.KINDS`).
TEMPLATES = {
    "video_wan2_2_14B_t2v": "t2v",
    "video_wan2_2_14B_i2v": "i2v",
    "video_wan2_2_14B_flf2v": "i2v",
    "video_wan2_2_5B_ti2v": "5B",
    "video_wan_animate2": "animate2",
    "video_wan_animate2_distilled": "animate2",
    "video_wan2_2_14B_s2v": "s2v",
    "video_wan_vace_14B_v2v": "vace",
    "video_wan_vace_inpainting": "vace",
    "video_wan_vace_outpainting": "vace",
    "video_wan_vace_14B_ref2v": "vace",
    "video_wan_vace_flf2v": "vace",
    "video_wan2_2_14B_fun_control": "fun control",
    "video_wan2_2_14B_fun_inpaint": "i2v",
    "video_wan2_2_14B_fun_camera": "camera",
}
SMALL = {"width": 64, "height": 64, "length": 9, "resize_type.width": 64, "resize_type.height": 64}
ENCODERS = {
    "CLIPTextEncode": "StandInText",
    "CLIPVisionEncode": "StandInVision",
    "AudioEncoderEncode": "StandInAudio",
    "SAM3_Detect": "StandInMask",
}
KEPT = {"StandInText": ("text",), "StandInVision": ("image",), "StandInMask": ("image",)}  # inputs that they have too


def templates_folder(python: str) -> Path | None:
    """Where the templates of that Python are; None: it has none."""
    code = "import comfyui_workflow_templates_json as t; print(t.__path__[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()) / "templates" if found.returncode == 0 else None


@dataclass(frozen=True)
class Scale:
    """How large a template runs. size: of every node that has one. steps: of every sampler, None as the template says.
    frames: of videos that are given. layers: None for tiny models, or how many of the real width."""

    size: Mapping[str, int]
    steps: int | None = 2
    frames: int = 9
    layers: int | None = None


TINY = Scale(SMALL)


def reduced(graph: Graph, scale: Scale) -> Graph:
    """The graph with stand-ins, in the size and steps of `scale`; only what samplers need."""
    made = deepcopy(graph)
    for one in made.values():
        kind, inputs = one["class_type"], one["inputs"]
        if kind in ENCODERS:
            stand_in = ENCODERS[kind]
            one |= node(stand_in, **{name: inputs[name] for name in KEPT.get(stand_in, ())})
        elif kind in ("LoadImage", "GetVideoComponents"):
            frames = 1 if kind == "LoadImage" else scale.frames
            one |= node("StandInPictures", name=str(inputs.get("image", "video")), frames=frames)
        elif kind == "LoraLoader":  # its CLIP goes to text encoders alone
            one |= node("LoraLoaderModelOnly", **{k: inputs[k] for k in ("model", "lora_name", "strength_model")})
        else:
            inputs |= {name: value for name, value in scale.size.items() if name in inputs and _has_size(kind)}
    return sampled_with(made, steps=scale.steps)


def sampled_with(
    graph: Graph, *, steps: int | None = None, solver: str | None = None, seed: int | None = None
) -> Graph:
    """The graph with so many steps, this solver and this seed in every sampler; None: as they are."""
    made = deepcopy(graph)
    for one in made.values():
        kind, inputs = one["class_type"], one["inputs"]
        if steps is not None and "steps" in inputs and (kind in (*SAMPLERS, "BasicScheduler")):
            inputs["steps"] = steps
        if steps is not None and kind == "KSamplerAdvanced":  # the first of two ends after half of them
            first = inputs["add_noise"] == "enable"
            inputs |= {"start_at_step": 0 if first else steps // 2, "end_at_step": steps // 2 if first else 10000}
        if steps is not None and kind == OURS and inputs.get("low_from_step"):
            inputs["low_from_step"] = steps // 2
        if solver is not None and "sampler_name" in inputs:
            inputs["sampler_name"] = solver
        if seed is not None:
            inputs |= {name: seed for name in ("seed", "noise_seed") if isinstance(inputs.get(name), int)}
    return made


def _has_size(kind: str) -> bool:
    return kind.startswith(("Wan", "Empty", "Resize"))


def observed(graph: Graph, run: str, accelerate: Mapping[str, Any] | None = None) -> Graph:
    """What the samplers need, each sampler's latents kept as `<run>-<sampler>.pt`. accelerate: inputs of WanCore
    Accelerate in front of each."""
    made = deepcopy(graph)
    for name, one in graph.items():
        if one["class_type"] not in (*SAMPLERS, OURS):
            continue
        source = one["inputs"]["model"]
        if accelerate is not None:
            added = f"accelerate {source[0]} {source[1]}"
            made[added] = node("WanCoreAccelerate", model=source, **accelerate)
            made[name]["inputs"]["model"] = [added, 0]
        made[f"keep {name}"] = node("KeepLatent", latent=[name, 0], name=f"{run}-{_plain(name)}")
    needed: set[str] = set()
    waiting = [name for name, one in made.items() if one["class_type"] == "KeepLatent"]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [value[0] for value in made[name]["inputs"].values() if isinstance(value, list)]
    return {name: one for name, one in made.items() if name in needed}


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)


def files_of(graph: Graph, kind: str, models: Path) -> dict[str, str]:
    """File -> kind of model, for every file that the graph names."""
    folders = {"unet_name": "diffusion_models", "vae_name": "vae", "lora_name": "loras"}
    kinds = {"unet_name": kind, "vae_name": "vae", "lora_name": "lora"}
    return {
        str(models / folders[name] / value): kinds[name]
        for one in graph.values()
        for name, value in one["inputs"].items()
        if name in folders and isinstance(value, str)
    }


class Templates:
    """A ComfyUI with stand-ins, and files as templates ask for them."""

    def __init__(self, checkout: Path, base: Path, folder: Path | None = None, **server: Any) -> None:
        """folder: of the templates; None: where its Python has them. server: more arguments of `ComfyUI`. Raises
        FileNotFoundError where there are no templates."""
        self.checkout, self.python = checkout, python_of(checkout)
        folder = folder or templates_folder(self.python)
        if folder is None:
            raise FileNotFoundError(f"{self.python} has no comfyui-workflow-templates-json: pip install it")
        self.folder, self.base = folder, make_base(base, STAND_INS)
        self.server = ComfyUI(checkout, base, **server)
        self.info: Mapping[str, Any] = self.server.get("/object_info")
        self.written: dict[str, str] = {}

    def graph(self, template: str, scale: Scale = TINY) -> Graph:
        """The template as it runs, and its files written."""
        return self.runnable(expand(self.workflow(template), self.info), template, scale)

    def workflow(self, template: str) -> dict[str, Any]:
        """The template in the page's form."""
        return json.loads((self.folder / f"{template}.json").read_text(encoding="utf-8"))

    def runnable(self, graph: Graph, template: str, scale: Scale = TINY) -> Graph:
        """A graph of the template as it runs, and its files written."""
        graph = reduced(graph, scale)
        self._write(files_of(observed(graph, ""), TEMPLATES[template], self.base / "models"), scale.layers)
        return graph

    def _write(self, files: dict[str, str], layers: int | None) -> None:
        if files == self.written:
            return
        shutil.rmtree(self.base / "models", ignore_errors=True)
        for folder in ("diffusion_models", "vae", "loras"):  # without one the server does not tell of its loader
            (self.base / "models" / folder).mkdir(parents=True)
        command = [self.python, str(HERE / "files.py"), str(self.checkout), json.dumps(files)]
        command += [] if layers is None else [str(layers)]
        subprocess.run(command, check=True, capture_output=True, cwd=self.checkout)
        self.written = files

    def kept(self, run: str) -> dict[str, Tensor]:
        """The latents that the last run of this name kept, in the order of its samplers; their files go."""
        paths = sorted((self.base / "output").glob(f"{run}-*.pt"), key=os.path.getmtime)
        latents = {path.stem.removeprefix(f"{run}-"): torch.load(path) for path in paths}
        for path in paths:
            path.unlink()
        return latents

    def stop(self) -> None:
        self.server.stop()
