"""Experts as GGUF files of random Q4_K blocks, under the names that the converters of ComfyUI-GGUF give them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from wan_core.checkpoint.detect import expected_shapes
from wan_core.config.outputs import written_beside
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.kernels.gguf_blocks import FORMATS

FORMAT = "Q4_K"
SCALES = (0, 2)  # where the float16 scale and minimum of a block of 256 stand
MEAN = 7.5  # of a nibble: minima that centre the numbers


def gguf_file(task: str, expert: str) -> str:
    return f"wan2.2_{task}_{expert}_noise_14B_{FORMAT}.gguf"


def write_gguf(config: DiTConfig, path: Path, device: torch.device, seed: int) -> None:
    """The matrices of the blocks are packed, the rest is float32."""
    import gguf

    draw = torch.Generator(device).manual_seed(seed)
    packed = {f"{name}.weight" for name in config.quantized_names()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(path) as temporary:
        writer = gguf.GGUFWriter(temporary, "wan")
        for name, shape in expected_shapes(config).items():
            if name in packed:
                rows = random_rows(*shape, draw)
                writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[FORMAT])
                continue
            values = torch.randn(shape, generator=draw, device=device) * shape[-1] ** -0.5
            if len(shape) == 5:
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
                values = values.reshape(shape[0] * shape[1], *shape[2:])
            values = torch.ones_like(values) if "norm" in name and name.endswith("weight") else values
            writer.add_tensor(name, values.cpu().numpy(), raw_dtype=gguf.GGMLQuantizationType.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def random_rows(rows: int, columns: int, draw: torch.Generator) -> np.ndarray:
    """uint8 [rows, bytes of a row]: numbers about as large as those of a trained matrix."""
    blocks = rows * columns // FORMATS[FORMAT].numbers
    data = torch.randint(0, 256, (blocks, FORMATS[FORMAT].bytes), dtype=torch.uint8, generator=draw, device=draw.device)
    scale = columns**-0.5 / 32 / 4.6  # of 6-bit scales of about 32, times nibbles that deviate by 4.6
    for at, factor in zip(SCALES, (1.0, MEAN), strict=True):
        half = torch.full((blocks, 1), scale * factor, dtype=torch.float16, device=draw.device)
        data[:, at : at + 2] = half.view(torch.uint8)
    return data.reshape(rows, -1).cpu().numpy()
