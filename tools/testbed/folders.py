"""The folders that `--model` takes: `t2v` and `i2v`, each with its experts, the text encoder and the VAE, and samples
for `wancore quality --samples`."""

from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

from tools.testbed.drawing import Size, draw_worlds
from tools.testbed.scenes import sample_worlds
from wan_core.checkpoint import load_dit, save
from wan_core.models.wan.model import WanModel

PARTS = {"high": "high_noise_model", "low": "low_noise_model"}
SHARED = ("text_encoder.safetensors", "vae.safetensors")
KEPT = Path(__file__).parents[2] / "benchmarks" / "testbed"  # experts in INT8, all files packed by xz
SAMPLES = "samples.jsonl"
SAMPLE_SEED = 7_000_000  # of captions and first frames; training draws others


@contextmanager
def unpacked(folder: Path) -> Iterator[Path]:
    """The folder, or one of its .xz files unpacked."""
    packed = sorted(folder.glob("*.safetensors.xz"))
    if not packed:
        yield folder
        return
    with TemporaryDirectory() as name:
        for path in packed:
            (Path(name) / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        yield Path(name)


def write_folders(source: Path, out: Path, *, size: Size, samples: int) -> None:
    """`out`/t2v and `out`/i2v of the parts that are in `source`, the experts in fp16."""
    with unpacked(source) as trained:
        _write(trained, out, size, samples)


def _write(trained: Path, out: Path, size: Size, samples: int) -> None:
    device = torch.device("cpu")
    worlds = sample_worlds(samples, SAMPLE_SEED)
    for task in ("t2v", "i2v"):
        folder = out / task
        folder.mkdir(parents=True, exist_ok=True)
        for name in SHARED:
            shutil.copyfile(trained / name, folder / name)
        lines: list[dict[str, str]] = [{"prompt": world.caption} for world in worlds]
        for part in PARTS.values():
            path = f"{part}.safetensors"
            expert = load_dit(trained / path, device=device, dtype=torch.float32)
            save(expert if task == "i2v" else without_image(expert), folder / path, torch.float16)
        if task == "i2v":
            for number, world in enumerate(worlds):
                lines[number]["image"] = f"first_{number:03}.png"
                frame = draw_worlds([world], replace(size, frames=1), SAMPLE_SEED + number)[0, :, 0]
                pixels = ((frame + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
                Image.fromarray(pixels).save(folder / lines[number]["image"])
        (folder / SAMPLES).write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(folder, flush=True)


def without_image(expert: WanModel) -> WanModel:
    """The same weights without the channels of mask and image: equal to giving zeros for them."""
    config = expert.config
    state = expert.state_dict()
    name = "patch_embedding.weight"
    state[name] = state[name][:, : config.out_channels].contiguous()
    with torch.device("meta"):
        plain = WanModel(replace(config, in_channels=config.out_channels))
    plain.load_state_dict(state, assign=True)
    return plain
