"""What a training run leaves in its folder: the parts as fp16 safetensors, and fp32 weights to go on from.

A `resume_<part>.pt` holds the raw weights and their moving average; each stays below 20 MB.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from wan_core.checkpoint import save
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.model import WanModel

PART_FILES = ("vae", "text_encoder", "t2v_high", "t2v_low", "i2v_high", "i2v_low", "driven", "clip_vision")


def part_path(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


def write_part(module: WanModel | VideoVAE | TextEncoder, folder: Path, part: str) -> None:
    """Save as fp16 with the metadata that `wan_core.checkpoint` reads back."""
    path = part_path(folder, part)
    save(module, path, torch.float16)
    print(f"wrote {path.name}: {path.stat().st_size:,} bytes", flush=True)


def round_to_fp16(module: nn.Module) -> None:
    """Give every weight the value that its file will hold, so that what is measured is what is shipped."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half())


def resume_path(folder: Path, part: str) -> Path:
    return folder / f"resume_{part}.pt"


def write_resume(folder: Path, part: str, weights: dict[str, Tensor], average: dict[str, Tensor]) -> None:
    state = {
        kind: {name: value.detach().cpu() for name, value in values.items()}
        for kind, values in (("weights", weights), ("average", average))
    }
    torch.save(state, resume_path(folder, part))


def read_resume(folder: Path, part: str) -> dict[str, dict[str, Tensor]] | None:
    """{"weights", "average"} of an earlier run, or None if it left nothing in `folder`."""
    path = resume_path(folder, part)
    if not path.is_file():
        return None
    print(f"going on from {path}", flush=True)
    return torch.load(path, map_location="cpu", weights_only=True)


def report_sizes(folder: Path) -> None:
    """Print the size of every part that is there, and their sum."""
    sizes = {part: part_path(folder, part).stat().st_size for part in PART_FILES if part_path(folder, part).is_file()}
    print(
        "  ".join(f"{part} {size / 1e6:.3f}" for part, size in sizes.items()), f"= {sum(sizes.values()) / 1e6:.3f} MB"
    )
