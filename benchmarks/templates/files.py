"""Run by ComfyUI's Python: Wan models of ComfyUI's own classes with random weights, saved in the layout that its
loaders recognise: tiny ones in float32, or of the real width with some of the layers in bfloat16.

    python benchmarks/templates/files.py COMFYUI_PATH JSON [LAYERS]       {"file": "kind of model", ...}
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

# What ComfyUI reads from a file: the width (heads of 128), the layers. It takes the rest for granted.
SMALL = {"dim": 256, "ffn_dim": 128, "num_heads": 2, "num_layers": 2}
INJECT_AFTER = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)  # blocks of S2V
FULL = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40}
# Kind -> the name of ComfyUI's class, and what makes it this variant.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t2v": ("WAN21_T2V", {"in_dim": 16}),
    "i2v": ("WAN21_T2V", {"in_dim": 36}),
    "5B": ("WAN22_T2V", {"in_dim": 48, "out_dim": 48}),
    "vace": ("WAN21_Vace", {"in_dim": 16, "vace_layers": 2, "vace_in_dim": 96}),
    "s2v": ("WAN22_S2V", {"in_dim": 16}),
    "camera": ("WAN22_Camera", {"in_dim": 36}),
    "fun control": ("WAN21_T2V", {"in_dim": 52, "in_dim_ref_conv": 16}),
    "animate2": ("WAN_Animate2", {"in_dim": 36}),
}


def transformer(kind: str, seed: int, layers: int | None) -> dict[str, Any]:
    """layers: of the real width; None: a tiny model of two."""
    import comfy.supported_models
    import torch

    name, changed = KINDS[kind]
    config = getattr(comfy.supported_models, name)
    sizes = SMALL if layers is None else {**FULL, "num_layers": layers}
    if layers is not None and kind == "vace":
        changed = {**changed, "vace_layers": max(1, layers // 5)}
    if kind == "s2v":  # those behind blocks that it has: WanCore refuses others
        changed = {**changed, "audio_inject_layers": [n for n in INJECT_AFTER if n < sizes["num_layers"]]}
    made = config({**config.unet_config, **sizes, **changed})
    made.set_inference_dtype(torch.float32 if layers is None else torch.bfloat16, None)
    device = None if layers is None or not torch.cuda.is_available() else torch.device("cuda")
    drawn = _drawn(made.get_model({}, device=device).diffusion_model, seed)
    return _with_used_injectors(drawn, sizes["num_layers"]) if kind == "s2v" else drawn


def _with_used_injectors(tensors: dict[str, Any], layers: int) -> dict[str, Any]:
    """S2V without those of its 12 injectors that belong behind blocks which it does not have."""
    used = sum(block < layers for block in INJECT_AFTER)
    return {
        name: value
        for name, value in tensors.items()
        if not name.startswith("audio_injector.") or int(name.split(".")[2]) < used
    }


def vae() -> dict[str, Any]:
    """The 2.1 VAE with 8 channels in place of 96."""
    from comfy.ldm.wan.vae import WanVAE

    return _drawn(WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True]), 1)


def lora(seed: int, dim: int) -> dict[str, Any]:
    """For the queries of the first block, which every kind has."""
    import torch

    draw, name = torch.Generator().manual_seed(seed), "diffusion_model.blocks.0.self_attn.q"
    down, up = (torch.randn(*shape, generator=draw) * 0.05 for shape in ((4, dim), (dim, 4)))
    return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(4.0)}


def _drawn(module: Any, seed: int) -> dict[str, Any]:
    import torch

    generators = {}
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if tensor.device not in generators:
                generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
            draw = generators[tensor.device]
            torch.nn.init.normal_(tensor, std=tensor[0].numel() ** -0.5 if tensor.ndim > 1 else 0.02, generator=draw)
            if ("norm" in name and name.endswith("weight")) or name.endswith("gamma"):
                tensor.add_(1)
    return {name: value.contiguous() for name, value in module.state_dict().items()}


def main(checkout: str, wanted: dict[str, str], layers: int | None) -> None:
    sys.path[:] = [checkout, *(path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent)]
    importlib.import_module("comfy.cli_args").args.cpu = layers is None
    import torch
    from safetensors.torch import save_file

    with torch.inference_mode(False):
        for path, kind in wanted.items():
            seed = crc32(Path(path).name.encode())  # a file of one name is the same in every template
            if kind == "lora":
                made = lora(seed, (SMALL if layers is None else FULL)["dim"])
            else:
                made = vae() if kind == "vae" else transformer(kind, seed, layers)
            # Nothing in the tensors tells Animate-2 from image-to-video: its file says it.
            told = {"config": json.dumps({"transformer": {"model_type": "animate2"}})} if kind == "animate2" else None
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save_file(made, path, told)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
