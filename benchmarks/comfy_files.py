"""Files with random weights under the names that ComfyUI's own Wan 2.2 templates ask for, as a server finds them.

Shapes, dtypes and spellings are those of the real files: FP8 experts with a scale for each matrix, a LoRA of rank 64
for each expert, UMT5 in FP8, the 2.1 VAE in bf16. The numbers are random, of the variance that keeps activations
finite. With `layers` the experts have fewer blocks. A file that is there with the same number of blocks is used again.
On a CPU the experts and the VAE are as small as ComfyUI's loaders take them, and there is no text encoder: its size is
fixed there, and `comfy_small` has a node in its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.measure import make_room
from wan_core.checkpoint import open_checkpoint
from wan_core.checkpoint.detect import TOKENIZER
from wan_core.checkpoint.layouts import TEXT_BLOCK_MODULES, TEXT_MODULES
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.safetensors_file import bytes_of, safetensors_header
from wan_core.checkpoint.save import metadata_of, save, write_safetensors
from wan_core.config.outputs import written_beside
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.text.umt5 import UMT5_XXL, TextEncoder, UMT5Encoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.sources import RANDOM, TINY

EXPERTS = ("high", "low")
TEXT = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
VAE = "wan_2.1_vae.safetensors"
IMAGES = ("start.png", "other.png", "third.png")
FP8_MAX = 448.0
WRITERS = 6  # threads, for each file
AT_ONCE = 100 * 2**30  # bytes of device memory in which all files of a task are made beside each other
SMALL = {"dim": 256, "ffn_dim": 128, "num_heads": 2, "num_layers": 2}  # ComfyUI takes heads of 128 for granted
SMALL_VAE = {"encoder_dim": 8, "decoder_dim": 8}
CONTRAST = 0.1
"""The last layer of the random VAE is multiplied by it. Without it frames flicker as no video does, and libx264 takes
several times as long as for a video that moves."""


def write_files(models: Path, device: torch.device, task: str, layers: int | None = None, wide: bool = False) -> None:
    """The files of a models folder that the template of `task` (i2v or t2v) reads, and pictures to begin with beside
    it. On a GPU with room all are made at once: most of the time goes into copying."""
    cuda = device.type == "cuda"
    at_once = cuda and torch.cuda.get_device_properties(device).total_memory > AT_ONCE
    with ThreadPoolExecutor(4 if at_once else 1) as pool:
        tasks = [pool.submit(write_expert, models, task, expert, device, layers, wide) for expert in EXPERTS]
        tasks += [pool.submit(write_loras, models, task, device), pool.submit(write_vae, models, device)]
        tasks += [pool.submit(write_text_encoder, models, device)] if cuda else []
        for one in tasks:
            one.result()
    write_images(models.parent)
    make_room(device)
    if cuda:
        os.sync()


def expert_file(task: str, expert: str, layers: int | None, wide: bool = False) -> str:
    """The name of an expert's file. task: i2v or t2v. wide: it asks for products in 16 bits."""
    more = ("" if layers is None else f"_{layers}_blocks") + "_wide" * wide
    return f"wan2.2_{task}_{expert}_noise_14B_fp8_scaled{more}.safetensors"


def lora_file(task: str, expert: str) -> str:
    return f"wan2.2_{task}_lightx2v_4steps_lora_v1_{expert}_noise.safetensors"


def write_expert(
    models: Path, task: str, expert: str, device: torch.device, layers: int | None, wide: bool = False
) -> None:
    path = models / "diffusion_models" / expert_file(task, expert, layers, wide)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    config = plain_config(task, device)
    config = replace(config, num_layers=layers or config.num_layers)
    module = random_module(config, device=device, dtype=torch.bfloat16, seed=EXPERTS.index(expert))
    assert isinstance(module, WanModel)
    values = {name: value.detach() for name, value in module.named_parameters()}
    write_file(as_fp8(values, config.quantized_names(), wide), path, metadata_of(module))


def write_file(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a file as `write_safetensors` does, by threads: most of the time goes into copies and new pages."""
    head, begins = safetensors_header(tensors, metadata)
    with written_beside(path) as temporary, temporary.open("r+b", buffering=0) as file:

        def write(name: str) -> None:
            content, at = bytes_of(tensors[name]), begins[name]
            while content:
                done = os.pwrite(file.fileno(), content, at)
                content, at = content[done:], at + done

        os.pwrite(file.fileno(), head, 0)
        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(write, (name for name in begins if tensors[name].numel())))


def write_lora(path: Path, config: DiTConfig, device: torch.device, rank: int = 64) -> None:
    """A random LoRA in LightX2V's spelling, bf16, on all linears of the blocks; small enough to change little."""
    draw = torch.Generator(device).manual_seed(7)
    block = replace(config, num_layers=1)
    sides = dict.fromkeys(block.quantized_names(), (config.dim, config.dim))
    sides |= {"blocks.0.ffn.0": (config.ffn_dim, config.dim), "blocks.0.ffn.2": (config.dim, config.ffn_dim)}
    state: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        for short, (n, k) in sides.items():
            module = f"diffusion_model.{short.replace('blocks.0.', f'blocks.{layer}.')}"
            down = torch.randn(rank, k, generator=draw, device=device) * k**-0.5
            up = torch.randn(n, rank, generator=draw, device=device) * 0.05 * rank**-0.5
            state[f"{module}.lora_down.weight"], state[f"{module}.lora_up.weight"] = down.bfloat16(), up.bfloat16()
            state[f"{module}.alpha"] = torch.tensor(float(rank))
    write_safetensors(state, path, {"distilled": "4-step"})


def write_loras(models: Path, task: str, device: torch.device) -> None:
    folder = models / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    for expert in EXPERTS:
        if not (folder / lora_file(task, expert)).exists():
            write_lora(folder / lora_file(task, expert), plain_config(task, device), device)


def plain_config(task: str, device: torch.device) -> DiTConfig:
    config = RANDOM[f"{task}-A14B"][0]
    return replace(config, **SMALL) if device.type == "cpu" else config


def write_text_encoder(models: Path, device: torch.device) -> None:
    """UMT5-XXL with Hugging Face's names and the embedded model's tokenizer, as in ComfyUI's own file."""
    path = models / "text_encoders" / TEXT
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    module = random_module(UMT5_XXL, device=device, dtype=torch.bfloat16)
    matrices = frozenset(name for name, part in module.named_modules() if isinstance(part, nn.Linear))
    values = as_fp8({name: value.detach() for name, value in module.named_parameters()}, matrices)
    tensors = {hf_name(name): value for name, value in values.items()}
    proto = open_checkpoint(TINY / "text_encoder.safetensors").read(TOKENIZER)
    tensors[TOKENIZER] = proto
    assert isinstance(module, UMT5Encoder)
    write_file(tensors, path, metadata_of(TextEncoder(module, Tokenizer(proto.numpy().tobytes()))))


def hf_name(name: str) -> str:
    """The name that Hugging Face's UMT5EncoderModel has for a parameter of ours."""
    top, inner = ({ours: theirs for ours, theirs, _ in reversed(table)} for table in (TEXT_MODULES, TEXT_BLOCK_MODULES))
    module, _, parameter = name.rpartition(".")
    if name.startswith("blocks."):
        _, block, module = module.split(".", 2)
        return f"encoder.block.{block}.{inner[module]}.{parameter}"
    return f"{top[module]}.{parameter}" if module in top else name


def write_vae(models: Path, device: torch.device) -> None:
    path = models / "vae" / VAE
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    config = RANDOM["i2v-A14B"][1]
    config = replace(config, **SMALL_VAE) if device.type == "cpu" else config
    module = random_module(config, device=device, dtype=torch.bfloat16)
    assert isinstance(module, VideoVAE)
    last = module.decoder.head["2"]
    assert isinstance(last, nn.Module)
    with torch.no_grad():
        for values in last.parameters():
            values.mul_(CONTRAST)
    save(module, path)


def write_images(base: Path, side: int = 640) -> None:
    """Square pictures of soft colours, as smooth as a photograph out of focus."""
    from PIL import Image

    draw = torch.Generator().manual_seed(0)
    folder = base / "input"
    folder.mkdir(parents=True, exist_ok=True)
    for name in IMAGES:
        coarse = torch.rand(1, 3, 10, 10, generator=draw)
        pixels = nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)[0].permute(1, 2, 0)
        Image.fromarray((pixels * 255).byte().numpy()).save(folder / name)


def as_fp8(values: dict[str, Tensor], names: Iterable[str], wide: bool = False) -> dict[str, Tensor]:
    """`values` with the weights of the linears `names` as e4m3, a scale for each, in the spelling of the files of
    2025: `X.scale_weight`, and a marker, which lets ComfyUI multiply in FP8 if it has no numbers, and asks for products
    in 16 bits if it has two (wide)."""
    found = dict(values)
    for name in names:
        weight = values[f"{name}.weight"]
        scale = weight.abs().amax().float() / FP8_MAX
        found[f"{name}.weight"] = (weight.float() / scale).to(torch.float8_e4m3fn)
        found[f"{name}.scale_weight"] = scale
    found["scaled_fp8"] = torch.zeros(2 if wide else 0).to(torch.float8_e4m3fn)
    return found
