"""Files and a second pack for a ComfyUI that tests start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

from tests.comfyui import Graph, Run
from tools.embedded_graphs import CAPTION, node
from wan_core.checkpoint import save
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.media.video import read_video
from wan_core.models.vae.config import VAE_22
from wan_core.models.wan.config import DiTConfig
from wan_core.pipeline.embedded import parse_caption
from wan_core.pipeline.sources import TINY
from wan_lab.metrics import judge
from wan_lab.shapes import draw

# A pack whose node gives a VAE that runs out of memory, as no file can.
FAULTS = """
import copy
import torch

class Short:
    def __init__(self, vae, always):
        self.vae, self.config, self.strips, self.always = vae, vae.config, vae.strips, always
    def decode_stream(self, latents, tile=None, **how):
        if tile is None or self.always:
            raise torch.cuda.OutOfMemoryError("no memory left, says the test")
        return self.vae.decode_stream(latents, tile=tile, **how)

class ShortPatcher:
    def __init__(self, patcher, always):
        self.patcher, self.always = patcher, always
    def use(self, memory):
        return Short(self.patcher.use(memory), self.always)
    def __getattr__(self, name):
        return getattr(self.patcher, name)

class ShortOfMemory:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("VAE",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"vae": ("VAE",), "always": ("BOOLEAN", {"default": True})}}
    def run(self, vae, always):
        short = copy.copy(vae)
        short.patcher = ShortPatcher(vae.patcher, always)
        return (short,)

NODE_CLASS_MAPPINGS = {"ShortOfMemory": ShortOfMemory}
"""
# A pack whose node looks at the models of a loader and at latents. It has an attention backend that fits no model here.
LOOK = """
import hashlib
import json
from dataclasses import replace

def facts_of(model, samples):
    from wan_core.execution.memory.host_weights import tensors_of
    from wan_core.execution.optimize import compilations
    pair = [model.patchers[expert] for expert in ("high", "low")]
    contents, held = [one.model.content for one in pair], set(pair)
    tensors = [tensor for one in held for tensor in tensors_of(one.model.content or one.model).values()]
    modules = [list(content.modules()) if content else [] for content in contents]
    return {
        "sum": float(samples.double().abs().sum()),
        "hash": hashlib.sha256(samples.contiguous().numpy().tobytes()).hexdigest(),
        "finite": bool(samples.isfinite().all()),
        "modules": [id(content) for content in contents],
        "attached": [sum(getattr(one, "lora_up", None) is not None for one in several) for several in modules],
        "merged": [one.model.content and len(one.on_model.merged.parameters) for one in pair],
        "told": sum(one.model_size() for one in held),
        "loaded": sum(one.loaded_size() for one in held),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "units": sum(sum(one.part.units) for one in held),
        "fp8": sum(tensor.numel() for tensor in tensors if "float8" in str(tensor.dtype)),
        "graphs": compilations(),
    }

class Look:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("STRING",)
    @classmethod
    def INPUT_TYPES(cls):
        from wan_core.ops.attention.registry import BACKENDS, Needs
        BACKENDS["odd"] = replace(BACKENDS["sdpa"], name="odd", needs=Needs(head_dims=(96,)))
        return {"required": {"model": ("WANCORE_MODEL",), "latent": ("LATENT",)}}
    @classmethod
    def IS_CHANGED(cls, **inputs):
        return float("nan")
    def run(self, model, latent):
        return (json.dumps(facts_of(model, latent["samples"])),)

NODE_CLASS_MAPPINGS = {"Look": Look}
"""
MAGCACHE = {  # inputs of WanCore Step Cache and Sparse Attention
    "cache": "magcache", "threshold": 10.0, "max_skips": 2, "interval": 2, "retention": 0.2,
    "sparsity": 0.0, "ramp": 0.0, "slope": True, "kernel": "auto",
}  # fmt: skip
BROKEN = ("transformer_engine", "flash_attn_interface", "cudnn")  # what speeds the engine up and ComfyUI never imports


def broken_libraries(base: Path) -> dict[str, str]:
    """An environment in which optional libraries are installed and raise when imported, as a wrong build does."""
    for name in BROKEN:
        (base / "site" / name).mkdir(parents=True)
        (base / "site" / name / "__init__.py").write_text(f"raise RuntimeError('{name} is broken, says the test')\n")
    return {"PYTHONPATH": str(base / "site")}


def make_files(base: Path) -> None:
    """A model file large enough to see in the server's memory, one that is none, and a picture."""
    folder = base / "models" / "diffusion_models"
    config = DiTConfig(
        in_channels=16, out_channels=16, dim=1024, ffn_dim=4096, num_heads=8, num_layers=4, text_dim=64, text_len=32
    )
    large = random_module(config, device=torch.device("cpu"), dtype=torch.bfloat16, seed=0)
    save(large, folder / "large.safetensors", torch.bfloat16)
    (folder / "broken.safetensors").write_bytes(b"not a model at all")
    make_ti2v(base)
    first = draw([parse_caption(CAPTION)], seed=3)[0, :, 0]
    Image.fromarray(((first + 1) * 127.5).byte().permute(1, 2, 0).numpy()).save(base / "input" / "first.png")


def make_ti2v(base: Path) -> None:
    """TI2V-5B in miniature: one transformer of 48 channels and a 2.2 VAE, with random weights."""
    dit = DiTConfig(
        in_channels=48, out_channels=48, dim=64, ffn_dim=96, num_heads=2, num_layers=2, text_dim=64, text_len=32
    )
    vae = replace(VAE_22, encoder_dim=16, decoder_dim=16, dim_mult=(1, 1, 1, 1), num_res_blocks=1)
    for config, name in ((dit, "diffusion_models/ti2v.safetensors"), (vae, "vae/ti2v.safetensors")):
        save(random_module(config, device=torch.device("cpu"), dtype=torch.float32, seed=0), base / "models" / name)


def write_parts(base: Path, text_encoder: str = "umt5", vae: str = "vae") -> None:
    """The embedded model's, the VAE without its own statistics of latents: with those of Wan 2.1."""
    shutil.copy(TINY / "text_encoder.safetensors", base / f"models/text_encoders/{text_encoder}.safetensors")
    write_safetensors(load_file(TINY / "vae.safetensors"), base / f"models/vae/{vae}.safetensors", {"format": "pt"})


def looked_at(graph: Graph, model: str = "model") -> Graph:
    """The graph, whose models and latents `LOOK` looks at. model: the node that the sampler has its model of."""
    return graph | {
        "look": node("Look", model=[model, 0], latent=["sampler", 0]),
        "facts": node("PreviewAny", source=["look", 0]),
    }


def facts_of(run: Run) -> dict[str, Any]:
    assert run.ok, run.status
    return json.loads(run.outputs["facts"]["text"][0])


def assert_comes_true(path: Path) -> None:
    verdict = judge(torch.from_numpy(read_video(path)), CAPTION)
    assert verdict.all_true, verdict
