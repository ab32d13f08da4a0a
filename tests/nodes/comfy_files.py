"""Files and a second pack for a ComfyUI that tests start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from tools.embedded_graphs import (
    CAPTION,
)
from wan_core.checkpoint import save
from wan_core.checkpoint.random import random_module
from wan_core.media.video import read_video
from wan_core.models.vae.config import VAE_22
from wan_core.models.wan.config import DiTConfig
from wan_core.pipeline.embedded import parse_caption
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
MAGCACHE = {  # inputs of WanCore Step Cache and Sparse Attention
    "cache": "magcache", "threshold": 10.0, "max_skips": 2, "interval": 2, "order": 1, "retention": 0.2,
    "sparsity": 0.0, "dense_steps": 0.0, "ramp": 0.0, "slope": True, "kernel": "auto",
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
    folder.mkdir(parents=True)
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
        path = base / "models" / name
        path.parent.mkdir(exist_ok=True)
        save(random_module(config, device=torch.device("cpu"), dtype=torch.float32, seed=0), path)


def assert_comes_true(path: Path) -> None:
    verdict = judge(torch.from_numpy(read_video(path)), CAPTION)
    assert verdict.all_true, verdict
