"""Graphs in API form that make videos with the embedded model, and a LoRA for it: for the tests in a ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.comfyui import Graph, node
from wan_core.checkpoint import open_checkpoint
from wan_core.checkpoint.save import write_safetensors
from wan_core.pipeline.sources import TINY as FILES

CAPTION = "a red circle moving right on a blue background"
TINY, TINY_I2V = "tiny (embedded)", "tiny i2v (embedded)"
SMALL = {"width": 48, "height": 48, "frames": 5}  # where only the machinery matters
LINEARS = {  # of an expert: name -> shape of the weight
    name.removesuffix(".weight"): info.shape
    for name, info in open_checkpoint(FILES / "t2v_high.safetensors").tensors.items()
    if name.startswith("blocks.") and name.endswith(".weight") and len(info.shape) == 2
}


def sampler(**changed: Any) -> dict[str, Any]:
    own = {"steps": 0, "shift": 0.0, "boundary": 0.0, "guidance_high": 0.0, "guidance_low": 0.0, "solver": "unipc"}
    links = {"model": ["model", 0], "positive": ["text", 0], "negative": ["text", 1], "latent": ["size", 0]}
    return node("WanCoreSampler", **{**links, "seed": 1, **own, "guidance_mode": "auto", **changed})


def loaders(high: str = TINY, low: str = TINY) -> Graph:
    """The loaders as prompts were saved before they had more inputs: those must go on working."""
    return {
        "model": node(
            "WanCoreModelLoader", high=high, low=low, precision="checkpoint", attention="auto", residency="auto"
        ),
        "encoder": node("WanCoreTextEncoderLoader", text_encoder=TINY, precision="checkpoint"),
        "vae": node("WanCoreVAELoader", vae=TINY, precision="auto"),
        "text": node("WanCoreTextEncode", clip=["encoder", 0], positive=CAPTION, negative=""),
    }


def save_nodes(images: list[Any]) -> Graph:
    return {
        "video": node("CreateVideo", images=images, fps=8),
        "save": node("SaveVideo", video=["video", 0], filename_prefix="test", format="auto", codec="auto"),
    }


def text_to_video(size: dict[str, int] | None = None, **sampling: Any) -> Graph:
    size = size or {"width": 96, "height": 96, "frames": 17}
    return {
        **loaders(),
        "size": node("WanCoreEmptyLatent", **size, latent_type="Wan 2.1 VAE (A14B, tiny)"),
        "sampler": sampler(**sampling),
        "decode": node("WanCoreVAEDecode", vae=["vae", 0], latent=["sampler", 0], tiling="auto", report=["sampler", 1]),
        **save_nodes(["decode", 0]),
    }


def small(**sampling: Any) -> Graph:
    return text_to_video(SMALL, **{"steps": 2, **sampling})


def image_to_video() -> Graph:
    size, encoded = {"width": 96, "height": 96, "frames": 17}, {"positive": ["text", 0], "negative": ["text", 1]}
    return {
        **text_to_video(),
        **loaders(TINY_I2V, TINY_I2V),
        "picture": node("LoadImage", image="first.png"),
        "size": node("WanCoreImageToVideo", **encoded, **size, vae=["vae", 0], first_image=["picture", 0]),
        "sampler": sampler(positive=["size", 0], negative=["size", 1], latent=["size", 2]),
    }


def write_lora(path: Path, seed: int) -> None:
    """In kohya's spelling, on every linear of the embedded model's blocks."""
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for name, (n, k) in LINEARS.items():
        flat = "lora_unet_" + name.replace(".", "_")
        state[f"{flat}.lora_down.weight"] = torch.randn(4, k, generator=draw) * k**-0.5
        state[f"{flat}.lora_up.weight"] = torch.randn(n, 4, generator=draw) * 0.3
    write_safetensors(state, path, {})
